"""Peak memory of training steps in Headwater, in a fresh process; --recompute and --method are those of `train`."""

from __future__ import annotations

import argparse
import sys

from memory_work import measured
from train_headwater import spec
from train_work import asked

from headwater.inspection.steps import trainer_step

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--method", default="adamw")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    given = asked()
    measured(lambda: trainer_step(spec(given), recompute=own.recompute, method=own.method), given.work)
