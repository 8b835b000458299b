"""Caches: the keys and values of tokens already read, so that each new token costs one step.

A stack has one *lane* for each rule and position its attention layers use; layers of a lane have the same keys' places,
so places and padding are kept once a lane and k, v once a layer (its *slot*).

    NoCache           keeps nothing: the keys of this call are all there are
    growing(model)    keeps everything, as long as the text becomes
    rolling(model)    lanes with a window keep only what it can still reach
    fixed(model, …)   static shapes for compiled decoding: room for `length` tokens from the start
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from headwater.errors import BadInput, TooLong

Slot = tuple[int, int]  # which application of which layer, which attention in it
Keys = tuple[Tensor, Tensor | None]  # places [B|1, S] and keep [B, S] of all keys, the new ones included


class Store(Protocol):
    """What one lane remembers."""

    @property
    def keep(self) -> Tensor | None: ...
    @property
    def empty(self) -> bool: ...
    def admit(self, rows: int, tokens: int) -> None: ...
    def keys(self, places: Tensor, keep: Tensor | None) -> Keys: ...
    def extend(self, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]: ...
    def select(self, rows: Tensor) -> None: ...
    def crop(self, length: int) -> None: ...


class NoCache:
    count: Any = 0
    made_for: object = None
    aligned = True

    def advance(self, tokens: int, keep: Tensor | None) -> None: ...

    def keys(self, lane: int, places: Tensor, keep: Tensor | None) -> Keys:
        return places, keep

    def extend(self, lane: int, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def cross(self, slot: Slot, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return make()


class Cache:
    """One store a lane. count [B|1, 1]: the real tokens read so far, which is the place of the next one."""

    def __init__(self, made_for: object, stores: list[Store], device: torch.device) -> None:
        self.made_for, self.stores = made_for, stores
        self.count: Tensor = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.crossed: dict[Slot, tuple[Tensor, Tensor]] = {}

    @property
    def aligned(self) -> bool:
        """Nothing is kept yet, so keys and queries are the same tokens."""
        return all(store.empty for store in self.stores)

    def admit(self, rows: int, tokens: int) -> None:
        """Refuse tokens that do not fit, before anything is changed."""
        for store in self.stores:
            store.admit(rows, tokens)

    def advance(self, tokens: int, keep: Tensor | None) -> None:
        self.count = self.count + (tokens if keep is None else keep.sum(1, keepdim=True))

    def keys(self, lane: int, places: Tensor, keep: Tensor | None) -> Keys:
        return self.stores[lane].keys(places, keep)

    def extend(self, lane: int, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.stores[lane].extend(slot, k, v)

    def cross(self, slot: Slot, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of the source: worked out for the first token, the same for all that follow."""
        if slot not in self.crossed:
            self.crossed[slot] = make()
        return self.crossed[slot]

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order: what beam search and a shrinking batch need."""
        for store in self.stores:
            store.select(rows)
        if self.count.shape[0] > 1:
            self.count = self.count[rows]
        self.crossed = {slot: (_rows(k, rows), _rows(v, rows)) for slot, (k, v) in self.crossed.items()}

    def crop(self, length: int) -> None:
        """Forget all but the first `length` columns (tokens a draft proposed and the model refused)."""
        for store in self.stores:
            store.crop(length)
        keep = self.stores[0].keep
        self.count = self.count.clamp(max=length) if keep is None else keep.sum(1, keepdim=True)


class Growing:
    """Everything, or the last `window` columns before the new ones.

    Where there is padding, the last *real* columns of each row: a window reaches over padding.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.order: Tensor | None = None
        self.kept: dict[Slot, tuple[Tensor, Tensor]] = {}
        self.places: Tensor | None = None
        self.keep: Tensor | None = None

    @property
    def empty(self) -> bool:
        return self.places is None

    def admit(self, rows: int, tokens: int) -> None:
        held = next((k.shape[0] for k, _ in self.kept.values()), rows)
        if held != rows:
            raise BadInput(f"cache: it holds {held} rows, got {rows}; use one cache for one batch, or select()")

    def keys(self, places: Tensor, keep: Tensor | None) -> Keys:
        if self.places is not None:
            old, new = self.keep, keep
            if old is not None or new is not None:
                old = torch.ones_like(self.places, dtype=torch.bool) if old is None else old
                new = torch.ones_like(places, dtype=torch.bool) if new is None else new
                keep = _join(old, new, 1)
            places = _join(self.places, places, 1)
        if self.window is not None and keep is not None:
            self.order = keep.byte().argsort(dim=1, stable=True)[:, -self.window or keep.shape[1] :]
        self.places, self.keep = self._last(places, 1), None if keep is None else self._last(keep, 1)
        return places, keep

    def extend(self, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if slot in self.kept:
            old_k, old_v = self.kept[slot]
            k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
        self.kept[slot] = self._last(k, 2), self._last(v, 2)
        return k, v

    def _last(self, t: Tensor, dim: int) -> Tensor:
        """All of it, or for a window the last columns it can still reach."""
        if self.window is None or t.shape[dim] <= self.window:
            return t
        if self.order is None:
            return t.narrow(dim, t.shape[dim] - self.window, self.window).clone()
        return torch.take_along_dim(t, self.order if dim == 1 else self.order[:, None, :, None], dim)

    def select(self, rows: Tensor) -> None:
        self.kept = {slot: (k[rows], v[rows]) for slot, (k, v) in self.kept.items()}
        self.places = _rows(self.places, rows)
        self.keep = _rows(self.keep, rows)

    def crop(self, length: int) -> None:
        if self.window is not None:
            raise BadInput("cache: a rolling cache cannot go back, for it has forgotten; use growing(model)")
        self.kept = {slot: (k[:, :, :length], v[:, :, :length]) for slot, (k, v) in self.kept.items()}
        self.places = None if self.places is None else self.places[:, :length]
        self.keep = None if self.keep is None else self.keep[:, :length]


class Fixed:
    """Room for `length` columns, written in place; what is not yet written is hidden by keep."""

    empty = False

    def __init__(self, slots: dict[Slot, tuple[int, int, int]], batch: int, length: int, like: Tensor) -> None:
        def room(*shape: int) -> Tensor:
            return like.new_zeros(shape)

        self.length = length
        self.used = torch.zeros(1, dtype=torch.long, device=like.device)
        self.places = torch.zeros(batch, length, dtype=torch.long, device=like.device)
        self.keep = torch.zeros(batch, length, dtype=torch.bool, device=like.device)
        self.kept = {s: (room(batch, g, length, k), room(batch, g, length, v)) for s, (g, k, v) in slots.items()}

    def admit(self, rows: int, tokens: int) -> None:
        batch, full = self.places.shape[0], int(self.used) + tokens
        if batch != rows:
            raise BadInput(f"cache: it has room for {batch} rows, got {rows}; make it for that batch")
        if full > self.length:
            raise TooLong(f"cache: it has room for {self.length} tokens, got token {full}; make it longer")

    def keys(self, places: Tensor, keep: Tensor | None) -> Keys:
        batch, new = self.places.shape[0], places.shape[1]
        self.columns = self.used + torch.arange(new, device=places.device)
        real = torch.ones(batch, new, dtype=torch.bool, device=places.device) if keep is None else keep
        self.places.index_copy_(1, self.columns, places.expand(batch, -1))
        self.keep.index_copy_(1, self.columns, real)
        self.used.add_(new)
        return self.places, self.keep

    def extend(self, slot: Slot, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept_k, kept_v = self.kept[slot]
        kept_k.index_copy_(2, self.columns, k.to(kept_k.dtype))
        kept_v.index_copy_(2, self.columns, v.to(kept_v.dtype))
        return kept_k, kept_v

    def select(self, rows: Tensor) -> None:
        self.kept = {slot: (k[rows], v[rows]) for slot, (k, v) in self.kept.items()}
        self.places, self.keep = self.places[rows], self.keep[rows]

    def crop(self, length: int) -> None:
        self.used.clamp_(max=length)
        self.keep[:, length:] = False


def growing(model: Any) -> Cache:
    return _cache(model, lambda lane: Growing())


def rolling(model: Any) -> Cache:
    return _cache(model, lambda lane: Growing(model.writer.lanes[lane][0].reach[0]))


def fixed(model: Any, batch: int, length: int) -> Cache:
    """The cache has the dtype and device of the model's weights."""
    like = next(model.parameters()).detach()
    return _cache(model, lambda lane: Fixed(model.writer.slots(lane), batch, length, like))


def _cache(model: Any, store: Callable[[int], Store]) -> Cache:
    stack = model.writer
    return Cache(stack.spec, [store(lane) for lane in range(len(stack.lanes))], next(model.parameters()).device)


def _join(old: Tensor, new: Tensor, dim: int) -> Tensor:
    """cat, where one side may have a single row that stands for all."""
    rows = max(old.shape[0], new.shape[0])
    return torch.cat((old.expand(rows, -1), new.expand(rows, -1)), dim)


def _rows(t: Any, rows: Tensor) -> Any:
    return t if t is None or t.shape[0] == 1 else t[rows]
