"""A claim: two ways to ask a model that must give the same answer. Each law of the checker is a handful of them.

B rows, L places. `exact` claims change tokens and keep shapes: what may not be seen must change nothing at all.
`close` claims change shapes (alone or in a batch, padded or not, cached or whole), where rounding may differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwater.errors import BadInput, Fault
from headwater.inspection.calling import Calling
from headwater.inspection.traces import Pass, Places, Twins, by_place, culprit, recording
from headwater.inspection.words import Both

EXACT = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CLOSE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Ask:
    """One question to the model: ids [B, L] and what goes with them. before: pieces a cache has read already."""

    ids: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)
    training: bool = False
    before: tuple[Ask, ...] | None = None
    under: Callable[[nn.Module], contextlib.AbstractContextManager] | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]


@dataclass(frozen=True)
class Claim:
    """a and b agree at these places; twins: the places in b, where they are others.

    key: the place in b whose token was changed. at: other places for some modules.
    """

    law: str
    says: Both
    a: Ask
    b: Ask
    places: Places
    exact: bool
    twins: Places | None = None
    key: int | None = None
    at: Callable[[str], Places] | None = None

    def pairs(self, path: str = "") -> Twins:
        places = self.at(path) if self.at else self.places
        return Twins(places, self.twins or places, self.a.size, self.b.size)


@dataclass(frozen=True)
class Broken:
    """Where a claim failed: the worst place, how far apart, and all places (row, column in a)."""

    claim: Claim
    row: int
    place: int
    gap: float
    share: float
    places: list[tuple[int, int]]


class Subject:
    """The model under examination. Asked the same twice it answers the same: every answer starts from one seed."""

    def __init__(self, model: nn.Module, how: Calling, seed: int) -> None:
        self.model, self.how, self.seed = model, how, seed
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.known: dict[int, tuple[Ask, Tensor]] = {}
        self.rounding = 0.0  # the largest difference that was let pass, relative
        self.passes = 0
        self.read: tuple[tuple[Tensor, ...], Any] = ((), None)  # the pieces a cache has read last, and what it holds

    def answer(self, ask: Ask) -> Tensor:
        """Logits for the ids, [B, L, V]; a model that answers once a row gives [B, 1, V]."""
        if id(ask) not in self.known:
            self.known[id(ask)] = ask, self._run(ask, contextlib.nullcontext(None))[0]
        return self.known[id(ask)][1]

    def trace(self, ask: Ask) -> list[Pass]:
        """The passes of the last call only: what a cache has read before is not compared."""
        return self._run(ask, recording(self.model))[1] or []

    def _run(self, ask: Ask, listening: Any) -> tuple[Tensor, list[Pass] | None]:
        self.model.train(ask.training)
        torch.manual_seed(self.seed)
        self.passes += 1
        under = ask.under(self.model) if ask.under else contextlib.nullcontext()
        steady = unmoved(self.model) if ask.training else contextlib.nullcontext()
        with torch.no_grad(), under, steady:
            state = self._after(ask.before or ())
            with listening as passes:
                if ask.before is None:
                    out = self._called(ask)
                else:
                    out, state = self._step(ask, state)
                    self.read = (*(piece.ids for piece in ask.before), ask.ids), state
        return out.detach(), passes

    def _after(self, pieces: tuple[Ask, ...]) -> Any:
        """What a cache holds after these pieces; where they are just what was read last, it goes on from there."""
        (ids, state), self.read = self.read, ((), None)
        if len(ids) == len(pieces) and all(piece.ids is one for piece, one in zip(pieces, ids, strict=True)):
            return state
        state = None
        for piece in pieces:
            self.passes += 1
            _, state = self._step(piece, state)
        return state

    def _called(self, ask: Ask) -> Tensor:
        try:
            return self.how(ask.ids, **ask.extras)
        except Fault:
            raise
        except Exception as error:  # a stranger's forward pass may raise anything at all
            given = ", ".join(
                ["ids " + str(tuple(ask.ids.shape)), *(f"{k} {tuple(v.shape)}" for k, v in ask.extras.items())]
            )
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise BadInput(f"the model must take ({given}), it raised {why}; pass call= or another length=") from error

    def _step(self, ask: Ask, state: Any) -> tuple[Tensor, Any]:
        assert self.how.step is not None
        try:
            return self.how.step(ask.ids, state, **ask.extras)
        except Fault:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise BadInput(
                f"step must take ids {tuple(ask.ids.shape)} after a cache, it raised {why}; pass step="
            ) from error

    def tolerance(self, out: Tensor, exact: bool) -> float:
        widths = EXACT if exact else CLOSE
        first = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), out.dtype)
        return max(widths.get(out.dtype, 0.0), widths.get(first, 0.0))

    def judge(self, claim: Claim) -> Broken | bool:
        """Where it is broken; else whether it could be judged: NaN equals nothing, and is told by another law."""
        a, b = self.answer(claim.a), self.answer(claim.b)
        found = _rows_apart(a, b, claim) if a.dim() == 2 else claim.pairs().apart(a, b)
        if found is None or a.isnan().any() or b.isnan().any():
            return False
        gap, scale = found
        limit = self.tolerance(a, claim.exact) * max(scale, 1e-6)
        bad = (gap > limit).nonzero().flatten()
        if not len(bad):
            if claim.exact:
                self.rounding = max(self.rounding, float(gap.max()) / max(scale, 1e-6))
            return True
        worst = int(gap.argmax())
        rows, columns = (index.tolist() for index in claim.places)
        places = [(rows[i], columns[i]) for i in bad.tolist()]
        return Broken(
            claim, rows[worst], columns[worst], float(gap[worst]), float(gap[worst]) / max(scale, 1e-6), places
        )

    def where(self, claim: Claim) -> tuple[str | None, bool]:
        """The module in which two runs part; and whether a key is noticed before it there rather than after."""
        limit = self.tolerance(self.answer(claim.a), claim.exact)
        a, b = self.trace(claim.a), self.trace(claim.b)
        path = culprit(a, b, claim.pairs, limit)
        return path, claim.key is not None and _blind(path, a, b, claim)


@contextlib.contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Mode, buffers and random numbers are given back as they were."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.random.fork_rng(devices=[]), unmoved(model):
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


@contextlib.contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Buffers are given back as they were: statistics that training gathers must not tell one answer from the next."""
    kept = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, was in kept:
                buffer.copy_(was)


def _rows_apart(a: Tensor, b: Tensor, claim: Claim) -> tuple[Tensor, float]:
    """One answer a row: rows are compared, whatever the places."""
    x, y = a[claim.places[0]].double(), b[(claim.twins or claim.places)[0]].double()
    return (x - y).abs().nan_to_num(nan=torch.inf).amax(1), float(x.abs().max())


def _blind(path: str | None, a: list[Pass], b: list[Pass], claim: Claim) -> bool:
    """With a leak to the front, the sign of an inverted mask. A row that sees nothing often sees all, so one may."""
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x.path == path == y.path]
    key, size, rows = claim.key or 0, claim.a.size, claim.places[0].unique()
    for x, y in pairs[:1]:
        was, now = (by_place(p.outputs[0], *size) for p in (x, y))
        if was is not None and now is not None and key + 2 < size[1]:
            noticed = (was != now)[rows].any(2).any(0).double()
            return float(noticed[:key].mean()) > 0.5 > float(noticed[key + 1 :].mean())
    return False
