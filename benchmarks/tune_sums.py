"""GRPO with a verifier: a small model that adds two numbers half right learns to be right, without a worked example.

    python benchmarks/tune_sums.py --work runs/sums

1. a model of a million weights learns sums of two digits from examples, and is stopped when it gets 40 % right
2. GRPO: it answers sums; an answer that is right is worth 1; no answer is ever shown
Bar: 90 % of sums that neither phase has seen.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
from tuning_demo import Bar, is_trained, judge, parse, parser, write_rows

import headwater
from headwater.training.predict import Predictor
from headwater.training.state import EvalEvent, Event

VERIFIER = '''"""A sum is right or it is not."""


def right(prompts, completions, answer):
    return [float(text.strip() == str(wanted)) for text, wanted in zip(completions, answer)]
'''
MODEL = {"d_model": 128, "layers": 2, "heads": 4, "d_ff": 512, "dropout": 0.0, "tokenizer": "char"}
STOP_AT = 40.0  # percent


def stop_when_half_right(event: Event) -> None:
    """End the first phase as Ctrl-C does."""
    if isinstance(event, EvalEvent) and event.metrics.get("exact", 0.0) >= STOP_AT:
        raise KeyboardInterrupt


def accuracy(trained: Predictor, sums: list[tuple[int, int]]) -> float:
    answers = trained([f"{a}+{b}=" for a, b in sums], max_tokens=6)
    return 100 * sum(text.strip() == str(a + b) for text, (a, b) in zip(answers, sums, strict=True)) / len(sums)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=2000, help="steps of GRPO [2000]")
    options = parse(made, needs_data=False)
    work: Path = options.work

    # data: each sum is in one of three parts
    order = np.random.default_rng(0).permutation(100 * 100)
    sums = [divmod(int(n), 100) for n in order]
    examples, prompts, test = sums[:4000], sums[4000:9500], sums[9500:]
    rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in examples]
    train_file = write_rows(work / "examples.jsonl", rows)
    prompt_file = write_rows(work / "prompts.jsonl", [{"prompt": f"{a}+{b}=", "answer": a + b} for a, b in prompts])
    (work / "verifier.py").write_text(VERIFIER)

    # phase 1: examples, until it is right in 40 % of the cases
    common = {"chat_template": "none", "quiet": False}
    steps = 60 if options.quick else 4000
    if not is_trained(work / "examples"):
        with contextlib.suppress(KeyboardInterrupt):
            headwater.train(train_file, task="chat", out=work / "examples", max_steps=steps, batch_tokens=2048,
                            lr=2e-3, optimizer="adamw", eval_every=20 if options.quick else 25, eval_examples=200,
                            metric="exact", samples=2, callbacks=[stop_when_half_right],
                            **MODEL, **common)  # fmt: skip
    before = headwater.training.predict.load_run(work / "examples")
    share_before = accuracy(before, test)

    # phase 2: GRPO on other sums
    if not is_trained(work / "grpo"):
        headwater.train(prompt_file, init_from=work / "examples", task="grpo", reward=f"{work}/verifier.py:right",
                        out=work / "grpo", rollouts=256, minibatch=256, group_size=8, answer_tokens=5,
                        max_steps=8 if options.quick else options.steps, lr=8e-4, min_lr_ratio=0.1,
                        optimizer="adamw", batch_tokens=4096, eval_every=200, eval_examples=100,
                        samples=2, log_every=20, **common)  # fmt: skip
    trained = headwater.training.predict.load_run(work / "grpo")
    share_after = accuracy(trained, test)
    print(f"\nsums that are right: {share_before:.1f} % before, {share_after:.1f} % after")
    if options.quick:
        return 0
    return judge([
        Bar("right after GRPO (%)", share_after, 90),
        Bar("right before it (%)", share_before, 60, at_most=True),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
