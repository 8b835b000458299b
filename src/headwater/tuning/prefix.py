"""Prefix tuning (Li and Liang 2021): learned keys and values before the tokens, in every layer.

The prefix is a KV cache that is full at the start: its keys are not rotated, and the tokens stand at the positions
after it. At the start it holds the keys and values of tokens of the vocabulary, as if a text came first.
With a width, the table is computed from a smaller one by an MLP while it learns (the paper's reparametrization).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headwater.core import Transformer
from headwater.core.base import check_positive
from headwater.core.cache import CacheKey, KVPair
from headwater.core.embeddings import ModelInputs
from headwater.core.stack import TransformerStack
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.parts import part
from headwater.tuning.base import Selection, TuningMethod
from headwater.tuning.hooks import (
    RecordingCache,
    StackArguments,
    StackChange,
    add_stack_change,
    change_selection,
    with_prefix,
)

USUAL_TOKENS = 16


@part
class PrefixTuning(TuningMethod):
    """Learned keys and values of some virtual tokens. width: of the MLP that they are trained through; 0: none."""

    tokens: int = USUAL_TOKENS
    width: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "tokens", _("16 is usual"))

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        stack = model.output_stack
        stack.require("cache", BadSetting)
        prefix = PrefixTable(name, change_selection(model), stack, self)
        prefix.initialize(stack, generator)
        add_stack_change(model, stack, prefix)


class PrefixTable(StackChange):
    """The keys and values [P, L · 2 · G · D] of a prefix: for each token by layer, key before value, then by head."""

    def __init__(self, name: str, selection: Selection, stack: TransformerStack, spec: PrefixTuning) -> None:
        super().__init__(name, selection)
        self.keys, self.heads, self.head_dim = _cache_shape(stack)
        self.count = spec.tokens
        self.size = len(self.keys) * 2 * self.heads * self.head_dim
        token_width = self.heads * self.head_dim
        if spec.width:
            self.table = nn.Parameter(torch.empty(spec.tokens, token_width))
            layers = (nn.Linear(token_width, spec.width), nn.Tanh(), nn.Linear(spec.width, self.size))
            self.mlp: nn.Module = nn.Sequential(*layers)
        else:
            self.table = nn.Parameter(torch.empty(spec.tokens, self.size))
            self.mlp = nn.Identity()

    @torch.no_grad()
    def initialize(self, stack: TransformerStack, generator: torch.Generator) -> None:
        """The keys and values of random tokens; through an MLP, random numbers."""
        if not isinstance(self.mlp, nn.Identity):
            self.table.normal_(0, 1, generator=generator)
            for layer in self.mlp.children():
                if isinstance(layer, nn.Linear):
                    bound = layer.in_features**-0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.zero_()
            return
        embed: Any = stack.embed
        vocab = embed.tokens.num_embeddings
        ids = torch.randint(vocab, (1, self.count), generator=generator)
        recording = RecordingCache()
        stack.forward(ModelInputs(ids.to(self._device(stack))), recording, _no_memory(stack))
        pairs = [t[0].transpose(0, 1).flatten(1) for key in self.keys for t in recording.kv[key]]  # each [P, G · D]
        self.table.data = torch.cat(pairs, 1).float().clone()

    @staticmethod
    def _device(stack: TransformerStack) -> torch.device:
        return next(stack.parameters()).device

    def install(self, model: Transformer, stack: TransformerStack) -> None:
        self.handles = [stack.register_forward_pre_hook(self._add_prefix)]

    def _add_prefix(self, _stack: nn.Module, arguments: StackArguments) -> StackArguments | None:
        return with_prefix(arguments, self.key_values(), self.count) if self.is_active else None

    def key_values(self) -> dict[CacheKey, KVPair]:
        """k and v [1, G, P, D] of each layer."""
        pairs = self.flat().view(self.count, len(self.keys), 2, self.heads, self.head_dim).permute(1, 2, 3, 0, 4)
        return {key: (pair[0][None], pair[1][None]) for key, pair in zip(self.keys, pairs.unbind(), strict=True)}

    def flat(self) -> Tensor:
        """The table [P, L · 2 · G · D], computed from a smaller one where there is an MLP."""
        table: Tensor = self.mlp(self.table)
        return table

    def extra_repr(self) -> str:
        return f"{self.count} tokens"


def _cache_shape(stack: TransformerStack) -> tuple[list[CacheKey], int, int]:
    """The keys of a stack's KV cache in the order of its layers, heads and head_dim; they must be the same in all."""
    shapes: dict[CacheKey, tuple[int, int, int]] = {}
    for group in range(len(stack.mask_groups)):
        shapes |= stack.kv_shapes(group)
    (heads, head_dim, v_head_dim), *others = set(shapes.values())
    if others or head_dim != v_head_dim:
        raise BadSetting(_("PrefixTuning: all layers must have the same heads and widths; use LoRA for this model"))
    return sorted(shapes), heads, head_dim


def _no_memory(stack: TransformerStack) -> Any:
    """An encoder output of one position of zeros, for a decoder that reads one."""
    if not any("cross_attn" in names for layer in stack.layers for names in getattr(layer, "names", ())):
        return None
    parameter = next(stack.parameters())
    ids = torch.zeros(1, 1, dtype=torch.long, device=parameter.device)
    return ModelInputs(ids, hidden_states=parameter.new_zeros(1, 1, stack.spec.d_model))
