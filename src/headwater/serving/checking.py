"""The checker on the page: the laws of headwater.check, and who sees whom, measured by changing one token at a time."""

from __future__ import annotations

from typing import Any

import torch

from headwater.inspection.check import LAWS, check
from headwater.inspection.subjects import still
from headwater.serving.asking import Check
from headwater.serving.shelf import Opened

LENGTH = 13  # as the checker's shortest rows
SEEN = 1e-6  # of the largest state: more than rounding


def checked(opened: Opened, ask: Check) -> dict[str, Any]:
    """The report on these laws; who sees whom comes with the whole, or with the law of the future."""
    report = check(opened.subject.model, probes=2, only=ask.only or LAWS)
    shown = not ask.only or "future" in ask.only
    return {**report.plain(), "sight": sight(opened) if shown else None}


def sight(opened: Opened) -> dict[str, Any]:
    """moved [Q, S]: how far the state at place i moves, of its size, when the token at place j is another one.

    A place may see j where its mask says so: for a causal stack, where j ≤ i. A leak is seen above the diagonal.
    """
    model: Any = opened.subject.model
    longest = opened.subject.longest
    length = min(LENGTH, longest or LENGTH)
    vocab = model.writer.spec.embed.vocab
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab, (1, length), generator=draw).repeat(length + 1, 1)
    for place in range(length):
        ids[place + 1, place] = (ids[place + 1, place] + 1 + vocab // 3) % vocab
    with still(model), torch.inference_mode():
        memory = None
        if opened.subject.two:
            source = torch.randint(model.encoder.spec.embed.vocab, (1, length), generator=draw)
            memory = model.encode(source.repeat(length + 1, 1))
        states = model.states(model.rows(ids, None, None, None, None), memory=memory)
    moved = (states[1:] - states[:1]).abs().amax(-1).T / states[0].abs().max()
    causal = model.decoder is not None
    moved = torch.where(moved > SEEN, moved, 0.0)
    late = [[i, j] for i in range(length) for j in range(i + 1, length) if causal and moved[i, j] > 0]
    return {"length": length, "causal": causal, "moved": [[round(x, 7) for x in row] for row in moved.tolist()],
            "late": late}  # fmt: skip
