"""Checkpoint overhead: the time of a step with checkpoints at the default interval, relative to that without any.

    python benchmarks/checkpoint_overhead.py [--seconds 130] [--rounds 2]

Both train the same model on the same data in turns, each long enough for two checkpoints at the default interval. The
target is a ratio of at most 1.03.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

from headwater.data.dates import dates_dataset
from headwater.training.api import train
from headwater.training.config import TrainConfig
from headwater.training.state import CheckpointEvent, StepEvent

RESULTS = Path(__file__).resolve().parent / "results"
MAX_RATIO = 1.03


def run_training(folder: Path, seconds: float, checkpoint_every: float) -> tuple[float, int, int]:
    """Seconds per step including everything between steps, the number of steps, and the number of checkpoints."""
    pairs = dates_dataset("train", 20_000)
    ends: list[float] = []
    checkpoints: list[int] = []

    def record(event: object) -> None:
        if isinstance(event, StepEvent):
            ends.append(time.perf_counter())
        elif isinstance(event, CheckpointEvent):
            checkpoints.append(event.step)

    train(
        examples={"train": pairs, "valid": pairs[:50]}, out=str(folder), callbacks=[record], size="l",
        batch_tokens=2048, max_steps=10**6, warmup=100, max_time=f"{seconds:.0f}s", eval_every=10**6, eval_examples=10,
        checkpoint_every=checkpoint_every, log_every=10,
    )  # fmt: skip
    return (ends[-1] - ends[0]) / (len(ends) - 1), len(ends), len(checkpoints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=130.0)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    default_interval = TrainConfig().checkpoint_every
    times: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(args.rounds):
        for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
            with tempfile.TemporaryDirectory() as folder:
                mean, steps, checkpoints = run_training(
                    Path(folder) / "run", args.seconds, default_interval if name == "with" else 10.0**9
                )
            times[name].append(mean)
            print(f"{name:<8} {1000 * mean:8.2f} ms per step, {steps} steps, {checkpoints} checkpoints", flush=True)
    ratio = statistics.median(times["with"]) / statistics.median(times["without"])
    print(f"ratio {ratio:.3f}, target {MAX_RATIO}: {'met' if ratio <= MAX_RATIO else 'NOT met'}")
    result = {
        "ratio": ratio,
        "seconds_per_step": times,
        "checkpoint_every": default_interval,
        "threads": torch.get_num_threads(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "checkpoint_overhead.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
