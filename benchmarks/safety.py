"""What safety costs: the time of a step with checkpoints at the default interval, over that without any.

    python benchmarks/safety.py [--seconds 130] [--rounds 2]

Both train the same model on the same data in turns, each long enough to hold two checkpoints of the default interval.
The bar is a ratio of at most 1.03.
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
BAR = 1.03


def a_run(folder: Path, seconds: float, checkpoint_every: float) -> tuple[float, int, int]:
    """Seconds a step with all that lies between steps, how many steps, and how many checkpoints there were."""
    pairs = dates_dataset("train", 20_000)
    ends: list[float] = []
    kept: list[int] = []

    def listen(event: object) -> None:
        if isinstance(event, StepEvent):
            ends.append(time.perf_counter())
        elif isinstance(event, CheckpointEvent):
            kept.append(event.step)

    train(
        examples={"train": pairs, "valid": pairs[:50]}, out=str(folder), callbacks=[listen], size="l",
        batch_tokens=2048, max_steps=10**6, warmup=100, max_time=f"{seconds:.0f}s", eval_every=10**6, eval_examples=10,
        checkpoint_every=checkpoint_every, log_every=10,
    )  # fmt: skip
    return (ends[-1] - ends[0]) / (len(ends) - 1), len(ends), len(kept)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    words.add_argument("--seconds", type=float, default=130.0)
    words.add_argument("--rounds", type=int, default=2)
    args = words.parse_args()
    usual = TrainConfig().checkpoint_every
    times: dict[str, list[float]] = {"with": [], "without": []}
    for number in range(args.rounds):
        for name in ("with", "without") if number % 2 == 0 else ("without", "with"):
            with tempfile.TemporaryDirectory() as folder:
                mean, steps, kept = a_run(Path(folder) / "run", args.seconds, usual if name == "with" else 10.0**9)
            times[name].append(mean)
            print(f"{name:<8} {1000 * mean:8.2f} ms a step, {steps} steps, {kept} checkpoints", flush=True)
    ratio = statistics.median(times["with"]) / statistics.median(times["without"])
    print(f"ratio {ratio:.3f}, the bar is {BAR}: {'kept' if ratio <= BAR else 'NOT kept'}")
    found = {"ratio": ratio, "seconds_a_step": times, "checkpoint_every": usual, "threads": torch.get_num_threads()}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "safety.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
