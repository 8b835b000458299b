"""Peak memory of tuning SmolLM2 whole, by LoRA, and by LoRA over its weights in 4 bits (Q4_1).

    HEADWATER_DATA=… python benchmarks/tune_memory.py --work runs/memory

Each is three steps of `headwater train --gradient-checkpointing` in a fresh process, on the same conversations: its
peak memory minus its memory after the imports. The losses of the first step must agree: the work is the same.
Bars: LoRA over 4 bits takes at most 40 % of the memory of tuning whole, and less than half of LoRA over floats.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
from pathlib import Path

from side_by_side import environment
from tuning_demo import Bar, float_base, judge, parse, parser, write_rows

import headwater
from headwater.training.state import StepEvent

STEPS = 3
TOKENS = 512  # of a step
PACKED = "LoRA over Q4_1"
RUNS = {"full": ("float", "full"), "LoRA": ("float", "lora"), PACKED: ("smollm2", "lora")}  # base, --tune
MAX_LOSS_DIFFERENCE = 0.05  # of weights in 4 bits, which are the same in both bases, with rounded sums


def peak_mb() -> float:
    """The peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train_and_measure(file: Path, base: str, method: str, out: Path) -> dict[str, float]:
    """Three steps in this process, above the memory of its imports."""
    losses: list[float] = []

    def keep_loss(event: object) -> None:
        if isinstance(event, StepEvent):
            losses.append(event.loss)

    before = peak_mb()
    headwater.train(file, init_from=base, out=out, task="chat", tune=method, tune_target=["all-linear"], lr=1e-5,
                    max_steps=STEPS, batch_tokens=TOKENS, max_length=TOKENS, eval_examples=1,
                    eval_every=STEPS, log_every=1, quiet=True, dtype="fp32", gradient_checkpointing=True,
                    callbacks=[keep_loss])  # fmt: skip
    return {"peak MB above imports": peak_mb() - before, "loss": losses[0]}


def measure(name: str, file: Path, work: Path, threads: int) -> dict[str, float]:
    base, method = RUNS[name]
    path = str(float_base(work)) if base == "float" else base
    out = work / name.replace(" ", "-")
    command = [sys.executable, __file__, "--child", str(file), path, method, str(out)]
    process = subprocess.run(command, env=environment(threads), capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{name}: {process.stderr.strip().splitlines()[-1]}")
    return json.loads(process.stdout.strip().splitlines()[-1])


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parse(made, needs_data="--child" not in sys.argv)
    if options.child:
        file, base, method, out = options.child
        print(json.dumps(train_and_measure(Path(file), base, method, Path(out))))
        return 0

    with gzip.open(options.data / "mbpp" / "mbpp.jsonl.gz", "rt", encoding="utf-8") as lines:
        tasks = [json.loads(line) for line in lines][:200]
    rows = [{"prompt": task["text"], "completion": task["code"]} for task in tasks]
    file = write_rows(options.work / "tasks.jsonl", rows)
    figures = {name: measure(name, file, options.work, options.threads) for name in RUNS}
    full, packed = (figures[name]["peak MB above imports"] for name in ("full", PACKED))
    print("\n| | peak MB above imports | of full | loss of the first step |\n|---|---|---|---|")
    for name, figure in figures.items():
        peak = figure["peak MB above imports"]
        print(f"| {name} | {peak:,.0f} | {peak / full:.0%} | {figure['loss']:.4f} |")
    difference = abs(figures[PACKED]["loss"] - figures["full"]["loss"])
    return judge([
        Bar("memory of LoRA over Q4_1, of full (%)", 100 * packed / full, 40, at_most=True),
        Bar("of LoRA over floats (%)", 100 * packed / figures["LoRA"]["peak MB above imports"], 50, at_most=True),
        Bar("losses differ by", difference, MAX_LOSS_DIFFERENCE, at_most=True),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
