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

from headwater.training.checkpoints import Checkpoints
from headwater.training.journals import Metrics, Order
from headwater.training.lock import Lock
from headwater.training.run import Run
from headwater.training.snapshot import keeper, restore
from headwater.training.storage import Disk

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

    def make_folder(self, path):
        self._die()
        super().make_folder(path)

    def create(self, path):
        self._die()
        return super().create(path)

    def put(self, file, piece):
        self._die()
        super().put(file, piece)

    def flush(self, file):
        self._die()
        super().flush(file)

    def rename(self, old, new):
        self._die()
        super().rename(old, new)

    def sync(self, folder):
        self._die()
        super().sync(folder)

    def remove(self, path):
        self._die()
        super().remove(path)

    def remove_folder(self, path):
        self._die()
        super().remove_folder(path)


def train(folder: Path, at: int | None) -> None:
    """One process of a run: begin, or go on from the newest checkpoint, to the end."""
    run = Run(folder)
    for path in (folder, run.checkpoints):
        path.mkdir(exist_ok=True)
    with Lock(folder / "lock"):
        checkpoints = Checkpoints(run.checkpoints, "run", Deadly(at) if at else None)
        made = trainer(STEPS, save_steps=4, eval_every=7, evaluate=mean_loss, average=0.9, micro_tokens=60)
        saved = checkpoints.newest()
        run.rewind(saved.step if saved else 0)
        if saved:
            restore(made, saved, FACTS)
        made.keep = keeper(checkpoints, FACTS)
        made.listeners = [Metrics(folder / "metrics.jsonl", 1), Order(folder / "order.jsonl")]
        made.run()
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
