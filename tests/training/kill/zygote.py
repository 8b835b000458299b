"""A process that has imported everything once and forks a child for each trial, so that a kill costs milliseconds.

It reads a line of JSON a trial: {"folder": …, "kill": seconds or null, "at": disk operation or null}. The child trains
in that folder, going on from whatever it finds there; it is killed with SIGKILL at a random instant, or kills itself at
an operation of the disk. The zygote answers with a line: how the child ended, and how many seconds it ran.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from small import mean_loss, trainer  # beside this folder; tests is no package

from headwater.training.checkpoint import CheckpointWriter, restore_checkpoint
from headwater.training.loggers import MetricsLogger, OrderLogger
from headwater.training.run_dir import RunDir, RunLock
from headwater.training.storage import CheckpointManager, Disk

STEPS = 60
FACTS = {"data": "copies"}


class Deadly(Disk):
    """The process dies, without a word, at one operation of the disk."""

    def __init__(self, at):
        self.left = at

    def _die(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def mkdir(self, path):
        self._die()
        super().mkdir(path)

    def create(self, path):
        self._die()
        return super().create(path)

    def write_chunk(self, file, piece):
        self._die()
        super().write_chunk(file, piece)

    def fsync(self, file):
        self._die()
        super().fsync(file)

    def rename(self, old, new):
        self._die()
        super().rename(old, new)

    def fsync_dir(self, folder):
        self._die()
        super().fsync_dir(folder)

    def unlink(self, path):
        self._die()
        super().unlink(path)

    def rmdir(self, path):
        self._die()
        super().rmdir(path)


def train(folder: Path, at: int | None) -> None:
    """One process of a run: begin, or go on from the newest checkpoint, to the end."""
    run = RunDir(folder)
    for path in (folder, run.checkpoints_dir):
        path.mkdir(exist_ok=True)
    with RunLock(folder / "lock"):
        checkpoints = CheckpointManager(run.checkpoints_dir, "run", Deadly(at) if at else None)
        made = trainer(STEPS, checkpoint_steps=4, eval_every=7, evaluate=mean_loss, ema=0.9, micro_batch_tokens=60)
        saved = checkpoints.latest_valid()
        run.truncate_logs(saved.step if saved else 0)
        if saved:
            restore_checkpoint(made, saved, FACTS)
        made.output = CheckpointWriter(checkpoints, FACTS)
        made.callbacks = [MetricsLogger(folder / "metrics.jsonl", 1), OrderLogger(folder / "order.jsonl")]
        made.train()
        weights = {name: p.detach().double().sum().item() for name, p in made.model.named_parameters()}
        bits = b"".join(p.detach().numpy().tobytes() for p in made.model.parameters())
        (folder / "end.json").write_text(json.dumps({"sha256": hashlib.sha256(bits).hexdigest(), "sums": weights}))


def trial(order: dict) -> dict:
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(Path(order["folder"]), order.get("at"))
            code = 0
        finally:
            os._exit(code)
    if order.get("kill") is not None:
        time.sleep(order["kill"])
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {"code": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - began}


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer(1)  # so that all that is imported late is imported here, once
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(trial(json.loads(line))), flush=True)
