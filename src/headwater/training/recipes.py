"""Settings known to work on public data, by name: headwater train --recipe multi30k train.en train.de."""

from __future__ import annotations

from typing import Any

from headwater.errors import BadSetting, nearest

RECIPES: dict[str, dict[str, Any]] = {
    # The embedded dates, 50,000 rows: about a minute on two cores; `headwater demo` says how many it reads rightly.
    "dates": {
        "d_model": 128, "heads": 4, "layers": 2, "d_ff": 256, "dropout": 0.0, "tokenizer": "bpe", "vocab": 1600,
        "batch_tokens": 3000, "lr": 3e-3, "warmup": 25, "weight_decay": 0.01, "beta2": 0.99, "max_steps": 500,
        "eval_every": 50, "eval_rows": 200, "metric": "exact", "log_every": 5},
    # Multi30k English to German, from scratch: 39.5 BLEU on test_2016 after 34 minutes of one core (tasks.py).
    "multi30k": {
        "d_model": 192, "heads": 4, "layers": 3, "d_ff": 768, "dropout": 0.15, "vocab": 6000, "position": "rotary",
        "method": "muon", "batch_tokens": 4000, "lr": 5e-3, "warmup": 200, "smoothing": 0.1, "average": 0.995,
        "weight_decay": 0.05, "max_time": "28m", "eval_rows": 300, "metric": "bleu"},
    # A small character model of running text, as nanoGPT trains it on a CPU …
    "characters": {
        "tokenizer": "characters", "d_model": 128, "heads": 4, "layers": 4, "d_ff": 512, "dropout": 0.0, "context": 64,
        "position": "learned", "batch_tokens": 768, "lr": 1e-3, "warmup": 100, "floor": 0.1, "beta2": 0.99,
        "weight_decay": 0.1, "max_steps": 2000, "held_out": 0.1},
    # … and the same model to the same loss in a fifth of the steps.
    "characters-quick": {
        "tokenizer": "characters", "d_model": 128, "heads": 4, "layers": 4, "d_ff": 512, "dropout": 0.0, "context": 64,
        "batch_tokens": 768, "method": "muon", "lr": 1e-2, "warmup": 30, "beta2": 0.99, "weight_decay": 0.1,
        "max_steps": 400, "held_out": 0.1},
    # The 2017 paper's own way to learn, for any data: Adam, the rate that rises and falls with the root of the step.
    "paper": {
        "method": "adamw", "schedule": "noam", "lr": 1.0, "warmup": 4000, "beta1": 0.9, "beta2": 0.98, "eps": 1e-9,
        "weight_decay": 0.0, "clip": 0.0, "smoothing": 0.1, "dropout": 0.1, "position": "sinusoidal"},
    # One sentence for a longer text (Debian's descriptions): a quarter of an hour; most is said in its first words.
    "synopsis": {
        "d_model": 192, "heads": 4, "layers": 2, "d_ff": 768, "dropout": 0.1, "vocab": 8000, "longest": 48, "cut": True,
        "position": "rotary", "batch_tokens": 3000, "smoothing": 0.1, "average": 0.995, "max_time": "15m",
        "eval_rows": 300, "metric": "rougeL"},
    # What to type, from what is wanted (nl2bash).
    "commands": {
        "d_model": 192, "heads": 4, "layers": 3, "d_ff": 768, "dropout": 0.15, "vocab": 3000, "position": "rotary",
        "batch_tokens": 2048, "smoothing": 0.1, "average": 0.995, "max_time": "15m",
        "eval_rows": 300, "metric": "chrf"},
    # A few thousand labelled sentences, or sentences with tagged words, and no model to start from.
    "sentences": {
        "d_model": 128, "heads": 4, "layers": 1, "d_ff": 256, "dropout": 0.4, "vocab": 4000, "lr": 1e-3,
        "weight_decay": 0.1, "average": 0.99, "max_time": "15m", "patience": 12},
    # Answers in a text, from about a thousand questions and a model to start from.
    "answers": {"longest": 320, "max_time": "15m", "weight_decay": 0.05},
}  # fmt: skip


def recipe(name: str) -> dict[str, Any]:
    if name not in RECIPES:
        raise BadSetting(f"no recipe is called {name!r}; {nearest(name, RECIPES)}")
    return dict(RECIPES[name])
