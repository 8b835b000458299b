"""Profile of a training step: the fraction of time of each kind of operation, by torch's profiler, in one thread.

    python benchmarks/step_profile.py [--workload a b c] [--dropout-sites none] [--steps 4]

One thread, so that no fraction contains waiting. A linear layer is counted with the bias, activation and dropout that
are fused into it. The lower bound is the time of the matrix products at the measured peak: everything but a faster
matrix product can save at most the rest.
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
from train_workload import DROPOUT_SITES, WORKLOADS, TrainOptions, batches

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
    "memory allocation": ("aten::fill_", "aten::zero_", "aten::copy_", "aten::empty"),
}
REST = "everything else"
TIMES = {"step": "ms per step", "matmul_at_peak": "ms of its matrix products at the measured peak"}


def step_profile(work: str, sites: str, steps: int) -> tuple[dict[str, float], dict[str, float]]:
    """The fraction of each kind; milliseconds of a step, and of its matrix products at the measured peak."""
    options = TrainOptions(WORKLOADS[work], 0.1 if DROPOUT_SITES[sites] else 0.0, DROPOUT_SITES[sites], False, "")
    step, step_batches = trainer_step(spec(options)), batches(options.workload, steps + 2)
    for batch in step_batches[:2]:
        step(batch)
    peak, start = rate(1024, 1024, 1024), time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in step_batches[2:]:
            step(batch)
    seconds = (time.perf_counter() - start) / steps
    self_times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    total = sum(self_times.values())
    fractions = {kind: sum(self_times.get(name, 0.0) for name in names) / total for kind, names in KINDS.items()}
    fractions[REST] = 1 - sum(fractions.values())
    return fractions, {"step": 1000 * seconds, "matmul_at_peak": options.workload.flops_per_step / peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", nargs="+", default=["a", "b", "c"], choices=WORKLOADS)
    parser.add_argument("--dropout-sites", default="none", choices=DROPOUT_SITES)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    profiles = {work: step_profile(work, args.dropout_sites, args.steps) for work in args.workload}
    lines = [f"### Where a step's time goes (dropout: {args.dropout_sites}; one thread, {args.steps} steps)\n"]
    columns = " | ".join(f"({work})" for work in profiles)
    lines += [f"| | {columns} |", "|---" * (len(profiles) + 1) + "|"]
    for kind in (*KINDS, REST):
        cells = " | ".join(f"{fractions[kind]:.1%}" for fractions, _ in profiles.values())
        lines.append(f"| {kind} | {cells} |")
    for name, title in TIMES.items():
        cells = " | ".join(f"{milliseconds[name]:.0f}" for _, milliseconds in profiles.values())
        lines.append(f"| {title} | {cells} |")
    report = {
        work: {"fractions": fractions, "ms": milliseconds} for work, (fractions, milliseconds) in profiles.items()
    }
    write(report, "\n".join(lines), "step_profile")


if __name__ == "__main__":
    main()
