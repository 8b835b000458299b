"""--processes N: this command again, N times, as one team. If one ends badly, none is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from headwater.errors import BadSetting

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def launch(processes: int, words: Sequence[str] | None = None) -> int:
    """The exit code of the first process, or of the first that failed."""
    cores = os.cpu_count() or 1
    if not 1 <= processes <= 64:
        raise BadSetting(f"--processes must be from 1 to 64, got {processes}; this machine has {cores} cores")
    words = list(sys.argv[1:] if words is None else words)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    shared.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes))))
    with tempfile.TemporaryFile() as aside:
        children = []
        for rank in range(processes):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            quiet = {} if rank == 0 else {"stdout": subprocess.DEVNULL, "stderr": aside}  # one of them speaks for all
            command = [sys.executable, "-m", "headwater", *words]
            tied = partial(_with_parent, os.getpid())
            children.append(subprocess.Popen(command, env=env, preexec_fn=tied, **quiet))  # type: ignore[call-overload]
        codes = _wait(children)
        if codes[0] == 0 and any(codes):
            aside.seek(0)
            sys.stderr.write(aside.read().decode(errors="replace")[-4000:])
    return next((code for code in codes if code), 0)


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Until all have ended. Signals of the terminal reach the children by themselves, so here they are passed over."""
    before = {
        s: signal.signal(s, lambda number, _: _pass_on(children, number)) for s in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() not in (None, 0, 130) for child in children):
                time.sleep(5)  # those who can say why, may
                for child in children:
                    child.kill()
            time.sleep(0.1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return [child.returncode for child in children]


def _pass_on(children: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    if number == signal.SIGTERM:
        for child in children:
            child.send_signal(number)


def _with_parent(parent: int) -> None:
    """A child ends when the launcher is killed: no orphans, even if it was killed before this was asked for."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def restarted(out: str) -> bool:
    """Whether torchrun has started this command again after a process died, and there is a run to go on with.

    It must be asked before the processes meet: until then none of them can have begun that run.
    """
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not out:
        raise BadSetting("--out must be given with torchrun --max-restarts: "
                         "a process that is started again finds its run there")  # fmt: skip
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and (Path(out) / "config.yaml").is_file()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
