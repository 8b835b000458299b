"""What the machine does to a run, in words a user can act on: memory that is not there, processes that are gone."""

from __future__ import annotations

from torch import OutOfMemoryError
from torch import distributed as dist

from headwater.errors import Fault, Unavailable, out_of_memory


def explained(error: BaseException, step: int, piece: str) -> Fault | None:
    """The fault behind an error of the machinery; None for a mistake of ours, which should be seen as it is."""
    text = str(error)
    if "can't start new thread" in text:
        return Unavailable(
            f"after step {step - 1} the machine has no room for another thread; end other programs, or raise its "
            "limits, and go on with --resume (the last checkpoint is safe)"
        )
    if isinstance(error, OutOfMemoryError) or out_of_memory(error):
        return Unavailable(f"step {step} needs more memory than there is, for a piece of {piece}; give --micro-tokens "
                           "or --recompute and go on with --resume (the last checkpoint is safe)")  # fmt: skip
    if isinstance(error, (dist.DistError, RuntimeError)) and ("gloo" in text or isinstance(error, dist.DistError)):
        why = text.splitlines()[0].rpartition("] ")[2][:80]
        return Unavailable(f"step {step} needs all processes, one is gone ({why}); "
                           "go on with --resume, or let torchrun --max-restarts do it")  # fmt: skip
    return None
