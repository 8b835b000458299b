"""A tiny model that answers every question in one of two ways, for tasks that tune a model."""

from __future__ import annotations

import json

import pytest

from headwater.training.api import train

TINY = {"d_model": 32, "layers": 1, "heads": 2, "d_ff": 64, "vocab": 300, "dropout": 0.0, "quiet": True}


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """The folder of its run."""
    folder = tmp_path_factory.mktemp("base")
    answers = ["It is a word.", "No idea."]
    rows = [{"prompt": f"What is word {n}?", "completion": answers[n % 2]} for n in range(40)]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train(path, task="chat", max_steps=40, eval_every=40, lr=1e-2, batch_tokens=300, out=folder / "run", **TINY)
    return folder / "run"
