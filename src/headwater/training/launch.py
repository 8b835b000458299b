"""Launcher of --nproc N: N processes of this command as one process group, by torch's elastic agent, as torchrun does.

If one fails, all are ended, and its error is the error of the command.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from headwater.errors import BadSetting, Unavailable
from headwater.i18n import _

PR_SET_PDEATHSIG = 1  # of prctl(2)
MAX_NPROC = 64
SHUTDOWN_SECONDS = 3600  # after Ctrl-C, for the last step and its checkpoint; Ctrl-C twice more ends at once


def launch(nproc: int, argv: Sequence[str] | None = None) -> int:
    """Run the command in nproc processes; returns the exit code. Only rank 0 prints."""
    cores = os.cpu_count() or 1
    if not 1 <= nproc <= MAX_NPROC:
        raise BadSetting(
            _("--nproc must be from 1 to 64, got {nproc}; this machine has {cores} cores", nproc=nproc, cores=cores)
        )
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the agent logs what is reported here
    agent_logger = logging.getLogger("torch.distributed.elastic")
    agent_logger.addHandler(logging.NullHandler())
    agent_logger.propagate = False
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    argv = list(sys.argv[1:] if argv is None else argv)
    with tempfile.TemporaryDirectory(prefix="headwater-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            max_restarts=0,
            run_id=str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            logs_specs=DefaultLogsSpecs(log_dir, redirects={rank: Std.ALL for rank in range(1, nproc)}),
            shutdown_timeout=SHUTDOWN_SECONDS,
        )
        try:
            elastic_launch(config, sys.executable)("-m", "headwater", *argv)
        except SignalException:
            return 130
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
            first, _failure = error.get_first_failure()
            return _report_failure(first, exit_codes, Path(log_dir))
    return 0


def _report_failure(first: int, exit_codes: dict[int, int], log_dir: Path) -> int:
    """Print the error of the process that failed first, unless rank 0 has printed one; returns the exit code."""
    code = exit_codes[first]
    if 0 < exit_codes.get(0, 0) < 128:
        return exit_codes[0]
    if code < 0:
        name = signal.Signals(-code).name
        raise Unavailable(_("process {rank} was killed ({signal}); continue with --resume", rank=first, signal=name))
    for log in log_dir.glob(f"*/attempt_0/{first}/stderr.log"):
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
    return code


def die_with_launcher() -> None:
    """Kill this process when its launcher dies: no orphans. Called before the rendezvous, which needs the launcher."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def is_elastic_restart(run_dir: str) -> bool:
    """Whether torchrun has restarted this command after a process died, and there is a run to resume.

    Must be called before the rendezvous: until then no rank can have created the run.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not run_dir:
        raise BadSetting(
            _("--out must be given with torchrun --max-restarts: a process that is started again finds its run there")
        )
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (Path(run_dir) / "config.yaml").is_file()


# --------------------------------------------------------------------------------------------------
# SignalHandler: SIGINT and SIGTERM request a stop after the current step; a second signal stops at once.


class SignalHandler:
    """Context manager: `requested` is the name of the received signal, or empty. Acts in the main thread only."""

    def __init__(self) -> None:
        self.requested = ""
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> SignalHandler:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous_handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        if self.requested == name:
            raise KeyboardInterrupt
        self.requested = self.requested or name  # a launcher may pass Ctrl-C on as SIGTERM
