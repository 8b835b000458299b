"""How high the memory of this process rises above what its imports take, from building the model to its third step."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable

from train_work import Batch, Work, batches


def peak_mb() -> float:
    """The most memory this process has ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(make: Callable[[], Callable[[Batch], float]], work: Work, steps: int = 3) -> None:
    given = batches(work, steps)
    before = peak_mb()
    step = make()
    built = peak_mb()
    for batch in given:
        step(batch)
    found = {"peak MB above imports": peak_mb() - before, "MB when built": built - before, "imports MB": before}
    print(json.dumps(found), flush=True)
