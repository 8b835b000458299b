"""Where a training step's time goes: the share of each kind of work, by torch's profiler, one thread.

    python benchmarks/shares.py [--work a b c] [--places none] [--steps 4]

One thread, so that waiting for another is in no share. A linear map is counted with the bias, activation and dropout
that are computed inside it. The floor is what the matrix products of a step would take at the peak measured by the
way: the most that anything but a faster matrix product could win is the time beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from side_by_side import write
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent / "contenders"))
from limits_matmul import rate
from train_headwater import spec
from train_work import PLACES, WORKS, Asked, batches

from headwater.bench import trainer_step


def both_ways(*functions: str) -> tuple[str, ...]:
    """The profiler's names of autograd functions: forward and backward."""
    return tuple(name + way for name in functions for way in ("", "Backward"))


KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", *both_ways("_Linears", "_FeedForward")),
    "attention": both_ways("_FusedAttention"),
    "norms": both_ways("_AddDropoutNorm"),
    "dropout and residual sums": (*both_ways("_DropoutAdd"), "aten::add", "aten::add_"),
    "softmax and loss": both_ways("_ChunkedCE"),
    "optimizer and clipping": ("aten::_fused_adamw_", "aten::linalg_vector_norm", "aten::_foreach_mul_"),
    "sums of biases": ("aten::sum",),
    "embeddings": (
        *both_ways("_EmbeddingLookup"),
        "aten::index_select",
        "aten::embedding_dense_backward",
        "aten::index",
        "aten::_index_put_impl_",
    ),
    "fresh memory": ("aten::fill_", "aten::zero_", "aten::copy_", "aten::empty"),
}
REST = "everything else"


def shares(work: str, places: str, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The share of each kind, and milliseconds of a step: as it is, and of its matrix products at the peak."""
    given = Asked(WORKS[work], 0.1 if PLACES[places] else 0.0, PLACES[places], False, "")
    step, some = trainer_step(spec(given)), batches(given.work, steps + 2)
    for batch in some[:2]:
        step(batch)
    peak, began = rate(1024, 1024, 1024), time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for batch in some[2:]:
            step(batch)
    took = (time.perf_counter() - began) / steps
    own = {event.key: event.self_cpu_time_total for event in seen.key_averages()}
    whole = sum(own.values())
    found = {kind: sum(own.get(name, 0.0) for name in names) / whole for kind, names in KINDS.items()}
    found[REST] = 1 - sum(found.values())
    return found, {"a step": 1000 * took, "at the peak": given.work.flops_per_step / peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", nargs="+", default=["a", "b", "c"], choices=WORKS)
    parser.add_argument("--places", default="none", choices=PLACES)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {work: shares(work, args.places, args.steps) for work in args.work}
    lines = [f"### Where a step's time goes (dropout: {args.places}; one thread, {args.steps} steps)\n"]
    lines += ["| | " + " | ".join(f"({work})" for work in found) + " |", "|---" * (len(found) + 1) + "|"]
    for kind in (*KINDS, REST):
        lines.append(f"| {kind} | " + " | ".join(f"{share[kind]:.1%}" for share, _ in found.values()) + " |")
    for name in ("a step", "at the peak"):
        title = {"a step": "ms a step", "at the peak": "ms of its matrix products at the measured peak"}[name]
        lines.append(f"| {title} | " + " | ".join(f"{took[name]:.0f}" for _, took in found.values()) + " |")
    write({work: {"shares": share, "ms": took} for work, (share, took) in found.items()}, "\n".join(lines), "shares")


if __name__ == "__main__":
    main()
