"""Switch a head off and see what changes: its slice of what the attention's `out` reads becomes zero."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headwater.errors import BadInput, BadSetting
from headwater.inspection.maps import Spot, chosen
from headwater.inspection.results import Result
from headwater.inspection.scores import language, vocabulary
from headwater.inspection.subjects import Reading, Token, read, still
from headwater.inspection.surprise import last_place
from headwater.inspection.words import Both

TOGETHER = 1 << 25  # scores that exist at one time


@dataclass(frozen=True)
class Choice:
    token: Token
    before: float
    after: float


@dataclass(frozen=True, eq=False)
class Ablation(Result):
    """choices: the most probable tokens at the place, with the head and without. loss, loss_without: the mean over
    the text (NaN where nothing follows). apart [Q]: the divergence of the two distributions at each place, in nats.
    """

    kind: str
    layer: int
    head: int
    tokens: tuple[Token, ...]
    choices: tuple[Choice, ...]
    loss: float
    loss_without: float
    apart: np.ndarray

    def lines(self) -> list[str]:
        said = "   ".join(f"{c.token.text!r} {c.before:.1%} → {c.after:.1%}" for c in self.choices[:5])
        change = "" if math.isnan(self.loss) else f"loss {self.loss:.3f} → {self.loss_without:.3f}   "
        return [f"without {self.kind} {self.layer}.{self.head}: {change}{said}"]


def ablate(
    model: Any,
    text: Any,
    layer: int,
    head: int,
    target: Any = None,
    *,
    kind: str | None = None,
    place: int | None = None,
    n: int = 10,
) -> Ablation:
    """What the model says without one head, at a place (the last).

    kind: decoder.self_attn unless another is named (encoder.self_attn, …).
    """
    reading = read(model, text, target)
    spot = _spot(reading, kind, layer, head)
    language(reading.model)
    with still(reading.model):
        before = _log_p(reading, 1)[0]
        with without(reading.model, [(spot, head)]):
            after = _log_p(reading, 1)[0]
    last = len(reading.tokens) - 1 if reading.causal or not _gaps(reading) else last_place(reading)
    at = last if place is None else place
    best = torch.cat((before[at].topk(n).indices, after[at].topk(n).indices)).unique()
    shares = [(int(i), math.exp(before[at, i]), math.exp(after[at, i])) for i in best]
    shares.sort(key=lambda row: -max(row[1:]))
    choices = tuple(Choice(reading.name(i), was, now) for i, was, now in shares)
    loss, loss_without = (_loss(reading, log_p) for log_p in (before, after))
    apart = (before.exp() * (before - after)).sum(-1)
    return Ablation(spot.kind, spot.layer, head, reading.tokens, choices, loss, loss_without, apart.numpy())


def _gaps(reading: Reading) -> bool:
    return any(token.id == getattr(reading.tokenizer, "mask", None) for token in reading.tokens)


def _spot(reading: Reading, kind: str | None, layer: int, head: int) -> Spot:
    kind = kind if kind is not None else ("decoder.self_attn" if reading.causal else "encoder.self_attn")
    return chosen(reading.model, [kind], [layer], [head])[0]


def _log_p(reading: Reading, rows: int) -> Tensor:
    """log p [rows, Q, V] of so many equal rows."""
    size = rows * len(reading.tokens) * vocabulary(language(reading.model))
    if size > 16 * TOGETHER:
        en = f"ablate: {len(reading.tokens)} tokens are too many for the whole of two answers; shorten the text"
        raise BadInput(Both(en, f"{len(reading.tokens)} 个词元太多；请缩短文字"))
    many = {name: value.expand(rows, -1) for name, value in reading.extras.items()}
    memory = reading.model.encode(many["source"]) if many else None
    asked = reading.model.rows(reading.ids.expand(rows, -1), None, None, None, None)
    return language(reading.model)(reading.model.states(asked, memory=memory), asked).float().log_softmax(-1)


def _loss(reading: Reading, log_p: Tensor) -> float:
    """The mean loss of what follows, log_p [Q, V]; of a model that looks both ways, of the tokens themselves."""
    ids = torch.tensor([token.id for token in (reading.follows if reading.causal else reading.tokens)])
    return float(-log_p[: len(ids)].gather(1, ids[:, None]).mean()) if len(ids) else math.nan


Pair = tuple[Spot, int]  # a head


@contextlib.contextmanager
def without(model: nn.Module, pairs: list[Pair]) -> Iterator[None]:
    """Row r of the batch goes without the head pairs[r]; a single head is taken from every row."""
    with contextlib.ExitStack() as hooks:
        for path in {spot.path for spot, _ in pairs}:
            attention: Any = model.get_submodule(path)
            handle = attention.out.register_forward_pre_hook(_silencer(path, attention.heads, pairs))
            hooks.callback(handle.remove)
        yield


def _silencer(path: str, heads: int, pairs: list[Pair]) -> Any:
    runs = 0

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal runs
        nth, runs = runs, runs + 1
        apart = inputs[0].unflatten(-1, (heads, -1)).clone()  # [B, Q, H, V]
        for row, (spot, head) in enumerate(pairs):
            if (spot.path, spot.nth) == (path, nth):
                apart[slice(row, row + 1) if len(pairs) > 1 else slice(None), :, head] = 0
        return (apart.flatten(2), *inputs[1:])

    return hook


# --------------------------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True, eq=False)
class Ablations(Result):
    """change [layers, heads]: how much the mean loss of the text rises without each head; NaN where there is none."""

    kind: str
    loss: float
    change: np.ndarray

    def lines(self) -> list[str]:
        order = np.argsort(-np.nan_to_num(self.change, nan=-np.inf), axis=None)[:5]
        best = [np.unravel_index(n, self.change.shape) for n in order]
        said = "   ".join(f"{layer}.{head} {self.change[layer, head]:+.3f}" for layer, head in best)
        return [f"heads of {self.kind} that this text needs most (loss {self.loss:.3f}, change without): {said}"]


def ablations(
    model: Any, text: Any, target: Any = None, *, kind: str | None = None, layers: list[int] | None = None
) -> Ablations:
    """The loss without each head in turn (of these layers, or of all); as many heads in one pass as memory allows."""
    reading = read(model, text, target)
    where = chosen(reading.model, [_spot(reading, kind, 0, 0).kind], layers)
    pairs = [(spot, head) for spot in where for head in range(spot.heads)]
    change = np.full((1 + where[-1].layer, max(spot.heads for spot in where)), np.nan, np.float32)
    cells = len(reading.tokens) * vocabulary(language(reading.model))
    size = max(1, TOGETHER // cells)
    with still(reading.model):
        loss = _loss(reading, _log_p(reading, 1)[0])
        if math.isnan(loss):
            en = "ablations: a text must have two tokens or more, got one; give a longer one"
            raise BadSetting(Both(en, "至少要有两个词元；请写长些"))
        for first in range(0, len(pairs), size):
            some = pairs[first : first + size]
            with without(reading.model, some):
                for (spot, head), row in zip(some, _log_p(reading, len(some)), strict=True):
                    change[spot.layer, head] = _loss(reading, row) - loss
    return Ablations(where[0].kind, loss, change)
