"""Training on text with headwater.train: the same files and tokens, logs and checkpoints included."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from quality_workload import Turns
from train_workload import count

from headwater.training.api import train
from headwater.training.setup import TrainSetup
from headwater.training.state import Event, StepEvent


class Paused:
    """A callback that counts real tokens without special tokens, and waits for the next turn."""

    def __init__(self) -> None:
        self.tokens = 0
        self.turns = Turns(lambda last: {"tokens": self.tokens})

    def begin(self, setup: TrainSetup) -> None:
        self.lengths, self.trainer = setup.task_data.train.lengths, setup.trainer
        self.turns.ready(parameters=count(setup.model), rows=len(self.lengths), batch_tokens=setup.config.batch_tokens)

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepEvent):
            self.tokens += int(self.lengths[event.examples].sum()) - 3 * len(event.examples)
            self.trainer.start_time += self.turns.after_step(event.step)


def main() -> None:
    folder, tokens = Path(sys.argv[1]), int(sys.argv[2])
    paused = Paused()
    with tempfile.TemporaryDirectory() as out:
        train(
            folder / "train.en", folder / "train.de", valid=[str(folder / "valid.en"), str(folder / "valid.de")],
            d_model=256, heads=4, layers=3, d_ff=1024, dropout=0.1, tokenizer=str(folder / "tokenizer"),
            batch_tokens=tokens, max_steps=10**6, eval_every=10**9, lr=3e-4, out=str(Path(out) / "run"),
            callbacks=[paused], on_setup=paused.begin, quiet=True)  # fmt: skip


if __name__ == "__main__":
    main()
