"""Peak memory of training steps in Headwater, in a fresh process. The flags are those of `headwater train`."""

from __future__ import annotations

import argparse
import sys

from memory_workload import measure
from train_headwater import spec
from train_workload import parse_options

from headwater.bench import trainer_step

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--optimizer", default="adamw")
    args, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    options = parse_options()
    measure(
        lambda: trainer_step(
            spec(options), gradient_checkpointing=args.gradient_checkpointing, optimizer=args.optimizer
        ),
        options.workload,
    )
