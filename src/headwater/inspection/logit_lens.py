"""The logit lens: what the model would say if it stopped after each layer.

The last norm and the head are put on the residual stream as each layer leaves it. A pre-norm stack has a last norm,
which every layer's stream needs before the head; of a post-norm stack each layer's stream is normed already, and its
last norm does nothing. So at the last layer the lens says what the model says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headwater.errors import BadSetting
from headwater.inspection.results import Result
from headwater.inspection.scores import in_parts, language, vocabulary
from headwater.inspection.subjects import Reading, Token, named, read, still


@dataclass(frozen=True, eq=False)
class Lens(Result):
    """Row 0 is the embedding, row n the stream after layer n - 1. L layers, P places, K choices.

    ids, shares [L + 1, P, K]: the most probable tokens. entropy [L + 1, P] in nats. answer [P]: what the model says in
    the end; answer_shares, answer_ranks [L + 1, P]: how probable that was, and how many were more so.
    """

    tokens: tuple[Token, ...]
    places: tuple[int, ...]
    layers: tuple[str, ...]
    ids: np.ndarray
    shares: np.ndarray
    entropy: np.ndarray
    answer: tuple[Token, ...]
    answer_shares: np.ndarray
    answer_ranks: np.ndarray
    words: tuple[tuple[Token, ...], ...]  # [L + 1][P]: the most probable token as text

    def settled(self, column: int) -> int:
        """The first row from which on the answer at a place stays the most probable."""
        wrong = np.flatnonzero(self.answer_ranks[:, column] > 0)
        return int(wrong[-1]) + 1 if len(wrong) else 0

    def lines(self) -> list[str]:
        made = ["logit lens, at the last place:"]
        for row, name in enumerate(self.layers):
            made.append(f"  {name:<12} {self.words[row][-1].text!r:<16} {self.shares[row, -1, 0]:.1%}")
        return made


def lens(model: Any, text: Any, target: Any = None, *, top: int = 5, places: Any = None) -> Lens:
    """What each layer would say at each place, or at the places asked for."""
    reading = read(model, text, target)
    if top < 1:
        raise BadSetting(f"lens: top must be at least 1, got {top}; 5 is usual")
    chosen = list(range(len(reading.tokens))) if places is None else [int(n) % len(reading.tokens) for n in places]
    with still(reading.model):
        head, writer = language(reading.model), reading.model.writer
        states = writer.final_norm(torch.cat(streams(reading))[:, chosen])  # [L + 1, P, D]
        last = torch.cat([log_p.argmax(1) for _, log_p in _scored(reading, head, states[-1:])])
        measured = _measured(reading, head, states, last, top)
    ids, shares, entropy, answer_shares, answer_ranks = (t.unflatten(0, states.shape[:2]).numpy() for t in measured)
    words = tuple(tuple(reading.name(int(n)) for n in row[:, 0]) for row in ids)
    names = ("embedding", *(f"layer {n}" for n in range(len(ids) - 1)))
    answer = tuple(named([int(n)], reading.tokenizer)[0] for n in last)
    return Lens(
        reading.tokens, tuple(chosen), names, ids, shares, entropy, answer, answer_shares, answer_ranks, words
    )  # fmt: skip


def streams(reading: Reading) -> list[Tensor]:
    """The residual stream [1, Q, D] after the embedding and after each layer of the stack before the head."""
    stack = reading.model.writer
    heard: list[Tensor] = []
    modules = [stack.embed, *stack.layers]
    handles = [module.register_forward_hook(lambda m, i, output: heard.append(output)) for module in modules]
    try:
        reading.states()
    finally:
        for handle in handles:
            handle.remove()
    return heard


def _scored(reading: Reading, head: Any, states: Tensor) -> Iterator[tuple[int, Tensor]]:
    """log p [places, V] in parts, of all layers and places in one row: a packed head is widened as seldom as may be."""
    rows = reading.model.rows(reading.ids, None, None, None, None)
    yield from in_parts(head, states.flatten(0, 1)[None], rows, vocabulary(head))


def _measured(reading: Reading, head: Any, states: Tensor, answer: Tensor, top: int) -> list[Tensor]:
    """For each of (L + 1) · P states: the top ids and their shares, the entropy, the answer's share and rank."""
    parts, answers = [], answer.repeat(len(states))
    for first, log_p in _scored(reading, head, states):
        best, own = log_p.topk(min(top, log_p.shape[1])), log_p.gather(1, answers[first : first + len(log_p), None])
        entropy = -torch.special.xlogy(p := log_p.exp(), p).sum(1)
        parts.append((best.indices, best.values.exp(), entropy, own[:, 0].exp(), (log_p > own).sum(1)))
    return [torch.cat(column) for column in zip(*parts, strict=True)]
