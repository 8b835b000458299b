"""StackChange: what an adapter adds to a stack, by hooks: keys and values before its tokens, or virtual tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headwater.core import NoCache, Transformer
from headwater.core.cache import CacheKey, KeyPositions, KVCache, KVPair, State
from headwater.core.embeddings import ModelInputs
from headwater.core.stack import TransformerStack
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.tuning.base import Change, Selection, selection_of

TOKEN_METHODS = ("prefix", "prompt", "p-tuning")  # of --tune: their rows hold one document each
StackArguments = tuple[Any, ...]  # inputs, cache, and perhaps memory


class StackChanges(nn.ModuleDict):
    """The changes of a stack by the name of their adapter; the child `changes` of the stack."""


class StackChange(Change):
    """A change of a stack, made by hooks, so that no path of the model is another."""

    def __init__(self, name: str, selection: Selection) -> None:
        super().__init__()
        self.name = name
        self.selection = selection
        self.handles: list[RemovableHandle] = []

    def install(self, model: Transformer, stack: TransformerStack) -> None:
        """Register the hooks."""
        raise NotImplementedError

    def remove_hooks(self) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def is_active(self) -> bool:
        """Whether the adapter acts now. It cannot act on some rows alone: those would be longer than the others."""
        rows = self.selection.rows_of(self.name)
        if isinstance(rows, Tensor):
            raise BadInput(
                _("adapter {name!r}: it adds tokens and cannot share a batch with others; use it alone", name=self.name)
            )
        return bool(rows)


def add_stack_change(model: Transformer, stack: TransformerStack, change: StackChange) -> None:
    """Add a change to a stack."""
    changes = stack._modules.get("changes")
    if not isinstance(changes, StackChanges):
        changes = StackChanges()
        stack.add_module("changes", changes)
    if change.name in changes:
        raise BadSetting(
            _("tune: two methods change the same module ({base}); give them different targets", base="stack")
        )
    changes[change.name] = change
    change.install(model, stack)


def change_selection(model: Transformer) -> Selection:
    """The selection of a model's adapters, for a change."""
    return selection_of(model)


class PrefixedCache:
    """A KV cache that begins with `count` keys and values, which all queries see; the tokens stand after them.

    kv: k and v [1|B, G, count, D] by the step of the stack.
    """

    aligned = False

    def __init__(self, inner: KVCache, kv: Callable[[CacheKey], KVPair], count: int) -> None:
        self.inner = inner
        self.kv = kv
        self.count = count

    @property
    def spec(self) -> object:
        return self.inner.spec

    @property
    def seen_tokens(self) -> Tensor | int:
        return self.inner.seen_tokens + self.count

    def check_capacity(self, rows: int, tokens: int) -> None:
        self.inner.check_capacity(rows, tokens)

    def advance(self, tokens: int, attention_mask: Tensor | None) -> None:
        self.inner.advance(tokens, attention_mask)

    def update_positions(self, mask_group: int, positions: Tensor, attention_mask: Tensor | None) -> KeyPositions:
        """The inner cache counts its own tokens, from 0."""
        k_positions, mask = self.inner.update_positions(mask_group, positions - self.count, attention_mask)
        first = torch.arange(self.count, device=positions.device)[None].expand(len(k_positions), -1)
        if mask is not None:
            mask = torch.cat((mask.new_ones(len(mask), self.count), mask), 1)
        return torch.cat((first, k_positions + self.count), 1), mask

    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        k, v = self.inner.update(mask_group, key, k, v)
        first_k, first_v = (t.to(k.dtype).expand(k.shape[0], -1, -1, -1) for t in self.kv(key))
        return torch.cat((first_k, k), 2), torch.cat((first_v, v), 2)

    def state(self, key: CacheKey) -> State | None:
        return self.inner.state(key)

    def set_state(self, key: CacheKey, state: State) -> None:
        self.inner.set_state(key, state)

    def cross(self, key: CacheKey, compute: Callable[[], KVPair]) -> KVPair:
        return self.inner.cross(key, compute)


class RecordingCache(NoCache):
    """No KV cache, but the keys and values of a forward pass are recorded."""

    def __init__(self) -> None:
        self.kv: dict[CacheKey, KVPair] = {}

    def update(self, mask_group: int, key: CacheKey, k: Tensor, v: Tensor) -> KVPair:
        self.kv[key] = k, v
        return k, v


def with_prefix(arguments: StackArguments, kv: Mapping[CacheKey, KVPair], count: int) -> StackArguments:
    """The arguments of a stack with keys and values before its tokens."""
    inputs, cache, *memory = arguments
    check_unpacked(inputs)
    if inputs.positions is not None:
        inputs = replace(inputs, positions=inputs.positions + count)
    return inputs, PrefixedCache(cache, kv.__getitem__, count), *memory


def check_unpacked(inputs: ModelInputs) -> None:
    """Packed documents would each need the added tokens."""
    if inputs.document_ids is not None:
        raise BadInput(_("adapters that add tokens take no packed documents; tune with lora, or leave packing out"))
