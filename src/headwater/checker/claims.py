"""Claims: pairs of queries to a model whose outputs must agree, and their verification.

B rows, L positions. Exact claims change tokens and keep shapes: an invisible token must not change the output at all.
Other claims change shapes (alone or in a batch, padded or not, cached or not), where rounding may differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from headwater.checker.adapters import ModelAdapter
from headwater.core.modules import eval_mode
from headwater.errors import BadInput, Fault
from headwater.i18n import Message, _
from headwater.inspection.hooks import PairedPositions, PositionIndex, RecordedCall, record_calls, responsible_module
from headwater.training.nonfinite import NonFinite, by_position, first_nonfinite_module

EXACT_TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
CLOSE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class Query:
    """One input of the model: ids [B, L] and keyword arguments. prefix: chunks that are already in the KV cache."""

    ids: Tensor
    model_kwargs: dict[str, Tensor] = field(default_factory=dict)
    training: bool = False
    prefix: tuple[Query, ...] | None = None
    context: Callable[[nn.Module], contextlib.AbstractContextManager] | None = None

    @property
    def size(self) -> tuple[int, int]:
        return self.ids.shape[0], self.ids.shape[1]


@dataclass(frozen=True)
class Claim:
    """The outputs of queries a and b agree at these positions; positions_b: those of b, if they differ.

    key: the position in b whose token was changed. positions_for_module: other positions for some modules.
    """

    law: str
    message: Message
    a: Query
    b: Query
    positions: PositionIndex
    exact: bool
    positions_b: PositionIndex | None = None
    key: int | None = None
    positions_for_module: Callable[[str], PositionIndex] | None = None

    def paired_positions(self, path: str = "") -> PairedPositions:
        positions = self.positions_for_module(path) if self.positions_for_module else self.positions
        return PairedPositions(positions, self.positions_b or positions, self.a.size, self.b.size)


@dataclass(frozen=True)
class Violation:
    """Where a claim failed: the worst position with its difference, and all positions (row, column) in a."""

    claim: Claim
    row: int
    position: int
    difference: float
    relative_difference: float
    positions: list[tuple[int, int]]


class ModelUnderTest:
    """A model with its adapter and a cache of its outputs. Every forward pass starts from the same seed."""

    def __init__(self, model: nn.Module, adapter: ModelAdapter, seed: int) -> None:
        self.model = model
        self.adapter = adapter
        self.seed = seed
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.logits_cache: dict[int, tuple[Query, Tensor]] = {}
        self.max_rounding = 0.0  # the largest relative difference that was within the tolerance
        self.forward_passes = 0
        self.cached_prefix: tuple[tuple[Tensor, ...], Any] = ((), None)  # the ids of the last chunks, and the KV cache

    def logits(self, query: Query) -> Tensor:
        """Logits [B, L, V] of a query, computed once; [B, V] of a model with one output per row."""
        if id(query) not in self.logits_cache:
            self.logits_cache[id(query)] = query, self._forward(query, contextlib.nullcontext(None))[0]
        return self.logits_cache[id(query)][1]

    def trace(self, query: Query) -> list[RecordedCall]:
        """The module calls of the query itself, without those of its prefix."""
        return self._forward(query, record_calls(self.model))[1] or []

    def first_nonfinite(self, query: Query) -> NonFinite | None:
        """The first module that outputs NaN or infinity from finite inputs."""
        return first_nonfinite_module(
            self.model, lambda: self._forward(query, contextlib.nullcontext(None)), query.size
        )

    def _forward(self, query: Query, recorder: Any) -> tuple[Tensor, list[RecordedCall] | None]:
        """The logits of a query in its mode and context, and the recorded module calls."""
        self.model.train(query.training)
        torch.manual_seed(self.seed)
        self.forward_passes += 1
        context = query.context(self.model) if query.context else contextlib.nullcontext()
        buffers = preserved_buffers(self.model) if query.training else contextlib.nullcontext()
        with torch.no_grad(), context, buffers:
            state = self._cache_state_after(query.prefix or ())
            with recorder as calls:
                if query.prefix is None:
                    out = self._call(query)
                else:
                    out, state = self._step(query, state)
                    self.cached_prefix = (*(chunk.ids for chunk in query.prefix), query.ids), state
        return out.detach(), calls

    def _cache_state_after(self, queries: tuple[Query, ...]) -> Any:
        """The KV cache after these chunks; reused if they are the chunks of the last call."""
        ids, state = self.cached_prefix
        self.cached_prefix = ((), None)
        if len(ids) == len(queries) and all(query.ids is last for query, last in zip(queries, ids, strict=True)):
            return state
        state = None
        for query in queries:
            self.forward_passes += 1
            _logits, state = self._step(query, state)
        return state

    def _call(self, query: Query) -> Tensor:
        """A full forward pass; any exception of the model becomes BadInput."""
        try:
            return self.adapter(query.ids, **query.model_kwargs)
        except Fault:
            raise
        except Exception as error:  # a foreign forward pass may raise any exception
            inputs = {"ids": query.ids, **query.model_kwargs}
            shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
            reason = _("{name}: {error}", name=type(error).__name__, error=str(error)[:200])
            raise BadInput(
                _(
                    "the model must take ({shapes}), it raised {why}; pass call= or another length=",
                    shapes=shapes,
                    why=reason,
                )
            ) from error

    def _step(self, query: Query, state: Any) -> tuple[Tensor, Any]:
        """A step with the KV cache; any exception of the model becomes BadInput."""
        assert self.adapter.step is not None
        try:
            return self.adapter.step(query.ids, state, **query.model_kwargs)
        except Fault:
            raise
        except Exception as error:
            reason = _("{name}: {error}", name=type(error).__name__, error=str(error)[:200])
            raise BadInput(
                _(
                    "step must take ids {shape} after a cache, it raised {why}; pass step=",
                    shape=tuple(query.ids.shape),
                    why=reason,
                )
            ) from error

    def tolerance(self, out: Tensor, exact: bool) -> float:
        """The relative tolerance for the dtypes of the output and of the weights."""
        tolerances = EXACT_TOLERANCE if exact else CLOSE_TOLERANCE
        weight_dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), out.dtype)
        return max(tolerances.get(out.dtype, 0.0), tolerances.get(weight_dtype, 0.0))

    def verify(self, claim: Claim) -> Violation | bool:
        """The violation; else whether the outputs were comparable: NaN is not, and is reported by the law "numbers"."""
        a = self.logits(claim.a)
        b = self.logits(claim.b)
        compared = _row_differences(a, b, claim) if a.dim() == 2 else claim.paired_positions().differences(a, b)
        if compared is None or a.isnan().any() or b.isnan().any():
            return False

        difference, scale = compared  # [pairs]
        scale = max(scale, 1e-6)
        violated = (difference > self.tolerance(a, claim.exact) * scale).nonzero().flatten()
        if not len(violated):
            if claim.exact:
                self.max_rounding = max(self.max_rounding, float(difference.max()) / scale)
            return True

        worst = int(difference.argmax())
        rows, columns = (index.tolist() for index in claim.positions)
        return Violation(
            claim,
            row=rows[worst],
            position=columns[worst],
            difference=float(difference[worst]),
            relative_difference=float(difference[worst]) / scale,
            positions=[(rows[i], columns[i]) for i in violated.tolist()],
        )

    def locate(self, claim: Claim) -> tuple[str | None, bool]:
        """The module in which the two runs diverge, and whether its causal mask looks inverted."""
        tolerance = self.tolerance(self.logits(claim.a), claim.exact)
        a = self.trace(claim.a)
        b = self.trace(claim.b)
        path = responsible_module(a, b, claim.paired_positions, tolerance)
        return path, claim.key is not None and _looks_inverted(path, a, b, claim)


@contextlib.contextmanager
def preserved_state(model: nn.Module) -> Iterator[None]:
    """Evaluation mode in a with-block; modes, buffers and the random number generator are restored afterwards."""
    with (
        torch.random.fork_rng(devices=[]),
        preserved_buffers(model),
        eval_mode(model, enable_grad=torch.is_grad_enabled()),
    ):
        yield


@contextlib.contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Restore the buffers after a with-block: running statistics must not change the next forward pass."""
    copies = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, copy in copies:
                buffer.copy_(copy)


def _row_differences(a: Tensor, b: Tensor, claim: Claim) -> tuple[Tensor, float]:
    """Differences of a model with one output per row: rows are compared, positions are ignored."""
    x = a[claim.positions[0]].double()
    y = b[(claim.positions_b or claim.positions)[0]].double()
    return (x - y).abs().nan_to_num(nan=torch.inf).amax(1), float(x.abs().max())


def _looks_inverted(path: str | None, a: list[RecordedCall], b: list[RecordedCall], claim: Claim) -> bool:
    """Whether positions before the changed key see it rather than those after it: an inverted causal mask.

    The mean is compared, because a query without any visible key often attends to all of them.
    """
    key = claim.key or 0
    size = claim.a.size
    pairs = ((x, y) for x, y in zip(a, b, strict=False) if x.path == path == y.path)
    first_pair = next(pairs, None)
    if first_pair is None:
        return False
    output_a, output_b = (by_position(call.outputs[0], *size) for call in first_pair)  # [B, L, values]
    if output_a is None or output_b is None or key + 2 >= size[1]:
        return False
    rows = claim.positions[0].unique()
    changed = (output_a != output_b)[rows].any(2).any(0).double()  # [L]
    return float(changed[:key].mean()) > 0.5 > float(changed[key + 1 :].mean())
