"""KV cache: the keys and values of earlier tokens, so that each new token costs one step.

A stack has one mask group for each pair of mask rule and position encoding of its attention layers. The layers of a
group have the same key positions, so positions and padding are stored once per group, and k, v once per layer.

A recurrent layer (linear attention) stores no columns but a state of constant size, which each forward pass replaces.

    NoCache               stores nothing: the keys are those of this forward pass
    dynamic_cache(model)  stores all tokens and grows with the text
    sliding_cache(model)  mask groups with a sliding window store only the tokens within it
    static_cache(model)   static shapes for compiled decoding: capacity for `length` tokens from the start
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from headwater.errors import BadInput, TooLong
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.core.model import Transformer

CacheKey = tuple[int, int]  # step of the stack (application of a layer), index of the attention layer in it
KVPair = tuple[Tensor, Tensor]  # keys [B, G, S, K] and values [B, G, S, V]
State = tuple[Tensor, ...]  # of a recurrent layer: tensors of constant size with the rows first; zeros at the start
KeyPositions = tuple[Tensor, Tensor | None]  # positions [B|1, S] and attention_mask [B, S] of all keys, new ones too


class KVCache(Protocol):
    """What a forward pass needs of a KV cache. spec: of the stack that it belongs to; None stores nothing.

    seen_tokens [B|1, 1]: the position of each row's next token. aligned: it is empty, so keys are the new tokens.
    """

    @property
    def spec(self) -> object: ...
    @property
    def seen_tokens(self) -> Tensor | int: ...
    @property
    def aligned(self) -> bool: ...
    def check_capacity(self, rows: int, tokens: int) -> None: ...
    def advance(self, tokens: int, attention_mask: Tensor | None) -> None: ...
    def update_positions(self, mask_group: int, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions: ...
    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair: ...
    def state(self, key: CacheKey) -> State | None: ...
    def set_state(self, key: CacheKey, state: State) -> None: ...
    def cross(self, key: CacheKey, compute: Callable[[], KVPair]) -> KVPair: ...


class GroupCache(Protocol):
    """The KV cache of one mask group."""

    @property
    def attention_mask(self) -> Tensor | None: ...
    @property
    def is_empty(self) -> bool: ...
    def check_capacity(self, rows: int, tokens: int) -> None: ...
    def update_positions(self, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions: ...
    def update(self, key: CacheKey, k: Tensor, v: Tensor) -> KVPair: ...
    def reorder(self, rows: Tensor) -> None: ...
    def crop(self, length: int) -> None: ...


class NoCache:
    """No KV cache: the keys and values are those of this forward pass."""

    seen_tokens = 0
    spec = None
    aligned = True

    def check_capacity(self, rows: int, tokens: int) -> None: ...

    def advance(self, tokens: int, attention_mask: Tensor | None) -> None: ...

    def update_positions(self, mask_group: int, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        return positions, attention_mask

    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        return k, v

    def state(self, key: CacheKey) -> State | None:
        return None

    def set_state(self, key: CacheKey, state: State) -> None: ...

    def cross(self, key: CacheKey, compute: Callable[[], KVPair]) -> KVPair:
        return compute()


class LayerCache(NamedTuple):
    """The entry of one attention layer in a KV cache: what its kernel reads and writes."""

    cache: KVCache
    mask_group: int
    key: CacheKey

    def update(self, k: Tensor, v: Tensor) -> KVPair:
        """Append the keys and values of the new tokens; returns those of all tokens."""
        return self.cache.update(self.mask_group, self.key, k, v)

    @property
    def state(self) -> State | None:
        """The state of a recurrent layer after the earlier tokens; None where there are none."""
        return self.cache.state(self.key)

    def set_state(self, state: State) -> None:
        """Replace the state of a recurrent layer."""
        self.cache.set_state(self.key, state)


NO_LAYER_CACHE = LayerCache(NoCache(), 0, (0, 0))


class Cache:
    """A KV cache: one GroupCache per mask group, the states of recurrent layers, and the cross-attention K/V.

    seen_tokens [B|1, 1]: the tokens so far without padding, which is the position of the next one.
    """

    def __init__(self, spec: object, group_caches: list[GroupCache], device: torch.device) -> None:
        self.spec = spec
        self.group_caches = group_caches
        self.seen_tokens: Tensor = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.states: dict[CacheKey, State] = {}
        self.cross_kv: dict[CacheKey, KVPair] = {}

    @property
    def aligned(self) -> bool:
        """The cache is empty, so keys and queries are the same tokens."""
        return all(group.is_empty for group in self.group_caches)

    def check_capacity(self, rows: int, tokens: int) -> None:
        """Refuse tokens that do not fit, before anything is written."""
        for group in self.group_caches:
            group.check_capacity(rows, tokens)

    def advance(self, tokens: int, attention_mask: Tensor | None) -> None:
        """Count the new tokens that are not padding."""
        new_tokens = tokens if attention_mask is None else attention_mask.sum(1, keepdim=True)
        self.seen_tokens = self.seen_tokens + new_tokens

    def update_positions(self, mask_group: int, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        return self.group_caches[mask_group].update_positions(positions, attention_mask)

    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        return self.group_caches[mask_group].update(key, k, v)

    def state(self, key: CacheKey) -> State | None:
        return self.states.get(key)

    def set_state(self, key: CacheKey, state: State) -> None:
        self.states[key] = state

    def cross(self, key: CacheKey, compute: Callable[[], KVPair]) -> KVPair:
        """Cross-attention keys and values: computed for the first token, reused for all that follow."""
        if key not in self.cross_kv:
            self.cross_kv[key] = compute()
        return self.cross_kv[key]

    def reorder(self, rows: Tensor) -> None:
        """Select these rows, in this order: for beam search, and for a batch from which finished rows leave."""
        for group in self.group_caches:
            group.reorder(rows)
        if self.seen_tokens.shape[0] > 1:
            self.seen_tokens = self.seen_tokens[rows]
        self.states = {key: tuple(t[rows] for t in state) for key, state in self.states.items()}
        self.cross_kv = {key: (_select_rows(k, rows), _select_rows(v, rows)) for key, (k, v) in self.cross_kv.items()}

    def crop(self, length: int) -> None:
        """Drop all but the first `length` columns (draft tokens that speculative decoding rejected)."""
        for group in self.group_caches:
            group.crop(length)
        attention_mask = self.group_caches[0].attention_mask
        if attention_mask is None:
            self.seen_tokens = self.seen_tokens.clamp(max=length)
        else:
            self.seen_tokens = attention_mask.sum(1, keepdim=True)


class DynamicCache:
    """A KV cache that grows: all columns, or with a sliding window the last `window` ones before the new ones.

    With padding, the last columns of each row that are not padding: a window does not count padding.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.window_columns: Tensor | None = None
        self.kv: dict[CacheKey, KVPair] = {}
        self.positions: Tensor | None = None
        self.attention_mask: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        return self.positions is None

    def check_capacity(self, rows: int, tokens: int) -> None:
        _check_rows(next((k.shape[0] for k, _ in self.kv.values()), rows), rows)

    def update_positions(self, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        if self.positions is not None:
            old = self.attention_mask
            new = attention_mask
            if old is not None or new is not None:
                old = torch.ones_like(self.positions, dtype=torch.bool) if old is None else old
                new = torch.ones_like(positions, dtype=torch.bool) if new is None else new
                attention_mask = _concat(old, new, 1)
            positions = _concat(self.positions, positions, 1)
        if self.window is not None and attention_mask is not None:
            padding_first = attention_mask.byte().argsort(dim=1, stable=True)
            self.window_columns = padding_first[:, -self.window or attention_mask.shape[1] :]
        self.positions = self._last_columns(positions, 1)
        self.attention_mask = None if attention_mask is None else self._last_columns(attention_mask, 1)
        return positions, attention_mask

    def update(self, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        if key in self.kv:
            old_k, old_v = self.kv[key]
            k = torch.cat((old_k, k), 2)  # [B, G, S, K]
            v = torch.cat((old_v, v), 2)  # [B, G, S, V]
        self.kv[key] = self._last_columns(k, 2), self._last_columns(v, 2)
        return k, v

    def _last_columns(self, t: Tensor, dim: int) -> Tensor:
        """All columns, or with a window those that are still within it."""
        if self.window is None or t.shape[dim] <= self.window:
            return t
        if self.window_columns is None:
            return t.narrow(dim, t.shape[dim] - self.window, self.window).clone()
        columns = self.window_columns if dim == 1 else self.window_columns[:, None, :, None]
        return torch.take_along_dim(t, columns, dim)

    def reorder(self, rows: Tensor) -> None:
        self.kv = {key: (k[rows], v[rows]) for key, (k, v) in self.kv.items()}
        self.positions = None if self.positions is None else _select_rows(self.positions, rows)
        self.attention_mask = None if self.attention_mask is None else _select_rows(self.attention_mask, rows)

    def crop(self, length: int) -> None:
        if self.window is not None:
            raise BadInput(
                _(
                    "cache: a sliding cache cannot be cropped, for it has dropped earlier tokens; "
                    "use dynamic_cache(model)"
                )
            )
        self.kv = {key: (k[:, :, :length], v[:, :, :length]) for key, (k, v) in self.kv.items()}
        self.positions = None if self.positions is None else self.positions[:, :length]
        self.attention_mask = None if self.attention_mask is None else self.attention_mask[:, :length]


class StaticCache:
    """A KV cache of static shape: `length` columns, written in place; attention_mask is False for unwritten ones."""

    is_empty = False

    def __init__(self, kv_shapes: dict[CacheKey, tuple[int, int, int]], batch: int, length: int, like: Tensor) -> None:
        def zeros(*shape: int) -> Tensor:
            return like.new_zeros(shape)

        self.length = length
        self.used = torch.zeros(1, dtype=torch.long, device=like.device)
        self.positions = torch.zeros(batch, length, dtype=torch.long, device=like.device)
        self.attention_mask = torch.zeros(batch, length, dtype=torch.bool, device=like.device)
        self.kv = {
            key: (zeros(batch, heads, length, k_dim), zeros(batch, heads, length, v_dim))
            for key, (heads, k_dim, v_dim) in kv_shapes.items()
        }

    def check_capacity(self, rows: int, tokens: int) -> None:
        batch = self.positions.shape[0]
        full = int(self.used) + tokens
        if batch != rows:
            raise BadInput(
                _(
                    "cache: it was created for {batch} rows, got {rows}; create one for that batch size",
                    batch=batch,
                    rows=rows,
                )
            )
        if full > self.length:
            raise TooLong(
                _(
                    "cache: its length is {length} tokens, got token {full}; create a longer one",
                    length=self.length,
                    full=full,
                )
            )

    def update_positions(self, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        batch = self.positions.shape[0]
        new = positions.shape[1]
        self.columns = self.used + torch.arange(new, device=positions.device)
        if attention_mask is None:
            attention_mask = torch.ones(batch, new, dtype=torch.bool, device=positions.device)
        self.positions.index_copy_(1, self.columns, positions.expand(batch, -1))
        self.attention_mask.index_copy_(1, self.columns, attention_mask)
        self.used.add_(new)
        return self.positions, self.attention_mask

    def update(self, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        all_k, all_v = self.kv[key]
        all_k.index_copy_(2, self.columns, k.to(all_k.dtype))
        all_v.index_copy_(2, self.columns, v.to(all_v.dtype))
        return all_k, all_v

    def reorder(self, rows: Tensor) -> None:
        self.kv = {key: (k[rows], v[rows]) for key, (k, v) in self.kv.items()}
        self.positions = self.positions[rows]
        self.attention_mask = self.attention_mask[rows]

    def crop(self, length: int) -> None:
        self.used.clamp_(max=length)
        self.attention_mask[:, length:] = False


class StateCache:
    """The group cache of recurrent layers: it stores nothing for a token, and counts them. The cache has the states."""

    attention_mask = None

    def __init__(self) -> None:
        self.rows = 0
        self.length = 0

    @property
    def is_empty(self) -> bool:
        return self.length == 0

    def check_capacity(self, rows: int, tokens: int) -> None:
        _check_rows(rows if self.is_empty else self.rows, rows)
        self.rows = rows

    def update_positions(self, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        self.length += positions.shape[1]
        return positions, attention_mask

    def update(self, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        return k, v

    def reorder(self, rows: Tensor) -> None:
        self.rows = len(rows)

    def crop(self, length: int) -> None:
        if length < self.length:
            raise BadInput(
                _(
                    "cache: the state of a recurrent layer cannot be cropped, for it does not keep tokens apart; "
                    "start an empty cache"
                )
            )


def dynamic_cache(model: Transformer) -> Cache:
    """A KV cache that stores every token."""
    return _cache(model, lambda group: DynamicCache())


def sliding_cache(model: Transformer) -> Cache:
    """A KV cache whose mask groups with a sliding window store only the tokens within it."""
    return _cache(model, lambda group: DynamicCache(model.output_stack.mask_groups[group].rule.window_size[0]))


def static_cache(model: Transformer, batch: int, length: int) -> Cache:
    """A KV cache of static shape, with the dtype and device of the model's weights."""
    like = next(model.parameters()).detach()
    return _cache(model, lambda group: StaticCache(model.output_stack.kv_shapes(group), batch, length, like))


def _cache(model: Transformer, build_group_cache: Callable[[int], GroupCache]) -> Cache:
    stack = model.output_stack
    group_caches = [StateCache() if g.is_recurrent else build_group_cache(i) for i, g in enumerate(stack.mask_groups)]
    return Cache(stack.spec, group_caches, next(model.parameters()).device)


def _check_rows(batch: int, rows: int) -> None:
    """Refuse a batch of another size than the cache holds."""
    if batch != rows:
        raise BadInput(
            _(
                "cache: it holds {batch} rows, got {rows}; use one cache for one batch, or reorder()",
                batch=batch,
                rows=rows,
            )
        )


def _concat(old: Tensor, new: Tensor, dim: int) -> Tensor:
    """torch.cat, where one side may have a single row, which is broadcast."""
    rows = max(old.shape[0], new.shape[0])
    return torch.cat((old.expand(rows, -1), new.expand(rows, -1)), dim)


def _select_rows(t: Tensor, rows: Tensor) -> Tensor:
    return t if t.shape[0] == 1 else t[rows]
