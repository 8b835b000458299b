"""Peak memory of this process above its imports, from building the model to its third training step."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable

from train_workload import Batch, Workload, batches


def peak_mb() -> float:
    """The peak resident memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(build_step: Callable[[], Callable[[Batch], float]], work: Workload, steps: int = 3) -> None:
    step_batches = batches(work, steps)
    before = peak_mb()
    step = build_step()
    after_build = peak_mb()
    for batch in step_batches:
        step(batch)
    result = {"peak MB above imports": peak_mb() - before, "MB after build": after_build - before, "imports MB": before}
    print(json.dumps(result), flush=True)
