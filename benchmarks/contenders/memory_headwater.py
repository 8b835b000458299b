"""Peak memory of training steps in Headwater, in a fresh process. The flags are those of `headwater train`."""

from __future__ import annotations

import argparse
import sys

from memory_work import measured
from train_headwater import spec
from train_work import asked

from headwater.bench import trainer_step

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--optimizer", default="adamw")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    given = asked()
    measured(
        lambda: trainer_step(spec(given), gradient_checkpointing=own.gradient_checkpointing, optimizer=own.optimizer),
        given.work,
    )
