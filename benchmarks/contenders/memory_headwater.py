"""Peak memory of training steps in Headwater, in a fresh process; --recompute works activations out again."""

from __future__ import annotations

import sys

from memory_work import measured
from train_headwater import spec
from train_work import asked

from headwater.inspection.steps import trainer_step

if __name__ == "__main__":
    recompute = "--recompute" in sys.argv
    sys.argv = [word for word in sys.argv if word != "--recompute"]
    given = asked()
    measured(lambda: trainer_step(spec(given), recompute=recompute), given.work)
