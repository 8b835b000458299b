"""Prompt tuning (Lester et al. 2021) and p-tuning (Liu et al. 2021): learned vectors before those of the tokens.

    PromptTuning  P vectors [P, D], at the start those of tokens of the vocabulary
    PTuning       the same, computed by an MLP from a table while they learn

They are put before the tokens of the source (the encoder, where there is one), after the scale of the embedding and
before its positions; the places of the virtual tokens are taken out of the output again, but a decoder that reads the
encoder sees them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headwater.core import Transformer
from headwater.core.base import check_positive
from headwater.core.cache import CacheKey, KVPair
from headwater.core.embeddings import ModelInputs
from headwater.core.stack import TransformerStack
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.parts import part
from headwater.tuning.base import Selection, TuningMethod
from headwater.tuning.embedding import TunedEmbedding
from headwater.tuning.hooks import (
    RecordingCache,
    StackArguments,
    StackChange,
    add_stack_change,
    change_selection,
    check_unpacked,
    with_prefix,
)


@part
class PromptTuning(TuningMethod):
    """Learned vectors of some virtual tokens before the input."""

    tokens: int = 16

    def __post_init__(self) -> None:
        check_positive(self, "tokens", _("16 is usual"))

    def apply(self, model: Transformer, name: str, generator: torch.Generator) -> None:
        stack = model.encoder if model.encoder is not None else model.output_stack
        if isinstance(stack.embed.tokens, TunedEmbedding):
            raise BadSetting(_("tune: LoRA changes the embedding, and virtual tokens cannot be added to it too"))
        add_stack_change(model, stack, self.build(name, change_selection(model), stack, generator))

    def build(self, name: str, selection: Selection, stack: Any, generator: torch.Generator) -> VirtualTokens:
        """The virtual tokens: at the start, random tokens of the vocabulary."""
        tokens = stack.embed.tokens
        ids = torch.randint(tokens.num_embeddings, (self.tokens,), generator=generator)
        with torch.no_grad():
            vectors = tokens(ids.to(next(stack.parameters()).device)) * stack.embed.scale
        return VirtualTokens(name, selection, vectors.float().clone(), nn.Identity())


@part
class PTuning(PromptTuning):
    """Virtual tokens that are computed by an MLP of two hidden layers while they learn. width: of these."""

    width: int = 128

    def build(self, name: str, selection: Selection, stack: Any, generator: torch.Generator) -> VirtualTokens:
        size = stack.embed.tokens.embedding_dim
        widths = (size, self.width, self.width, size)
        layers: list[nn.Module] = []
        for before, after in zip(widths, widths[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
        with torch.no_grad():
            for layer in layers[::2]:
                for parameter in layer.parameters():
                    parameter.uniform_(-(parameter.shape[-1] ** -0.5), parameter.shape[-1] ** -0.5, generator=generator)
            table = torch.randn(self.tokens, size, generator=generator)
        return VirtualTokens(name, selection, table, nn.Sequential(*layers[:-1]))


class VirtualTokens(StackChange):
    """The vectors [P, D] of virtual tokens, by hooks on a stack and on its embedding table."""

    def __init__(self, name: str, selection: Selection, table: Tensor, mlp: nn.Module) -> None:
        super().__init__(name, selection)
        self.table = nn.Parameter(table)
        self.mlp = mlp
        self.count = len(table)
        self.scale = 1.0
        self.is_memory = False
        self.adding = False  # whether the embedding has the virtual tokens in its ids
        self.recorded: tuple[object, dict[CacheKey, KVPair]] | None = None

    def flat(self) -> Tensor:
        """The vectors [P, D]."""
        vectors: Tensor = self.mlp(self.table)
        return vectors

    def install(self, model: Transformer, stack: TransformerStack) -> None:
        embed: Any = stack.embed
        self.scale = embed.scale
        self.is_memory = model.encoder is not None and model.decoder is not None
        self.handles = [
            stack.register_forward_pre_hook(self._before_stack),
            embed.tokens.register_forward_hook(self._after_embedding),
            stack.register_forward_hook(self._after_stack),
        ]
        if self.is_memory:
            self.handles.append(model.bridge.register_forward_pre_hook(self._before_bridge))

    # --------------------------------------------------------------------------------------------- the hooks

    def _before_stack(self, stack: Any, arguments: StackArguments) -> StackArguments | None:
        """Put the virtual tokens before the input; with a KV cache, their keys and values before the cached ones."""
        if not self.is_active:
            return None
        inputs, cache, *memory = arguments
        check_unpacked(inputs)
        if cache.spec is not None:
            return with_prefix(arguments, self._key_values(stack), self.count)
        self.adding = True
        return self.extend(inputs), cache, *memory

    def _after_embedding(self, _table: nn.Module, _arguments: object, vectors: Tensor) -> Tensor | None:
        if not self.adding:
            return None
        prompt = (self.flat() / self.scale).to(vectors.dtype).expand(len(vectors), -1, -1)
        return torch.cat((prompt, vectors[:, self.count :]), 1)

    def _after_stack(self, _stack: nn.Module, _arguments: object, states: Tensor) -> Tensor | None:
        if not self.adding:
            return None
        self.adding = False
        return None if self.is_memory else states[:, self.count :]

    def _before_bridge(self, _bridge: nn.Module, arguments: tuple[ModelInputs]) -> tuple[ModelInputs] | None:
        """The decoder sees the virtual tokens of the encoder."""
        return (self.extend(arguments[0]),) if self.is_active else None

    def extend(self, inputs: ModelInputs) -> ModelInputs:
        """Inputs with places for the virtual tokens before the others."""

        def pad(t: Tensor | None, value: int) -> Tensor | None:
            return None if t is None else F.pad(t, (self.count, 0), value=value)

        positions = inputs.positions
        if positions is not None:
            first = torch.arange(self.count, device=positions.device).expand(len(positions), -1)
            positions = torch.cat((first, positions + self.count), 1)
        ids = F.pad(inputs.ids, (self.count, 0))
        mask = pad(inputs.attention_mask, True)
        return replace(
            inputs, ids=ids, attention_mask=mask, token_types=pad(inputs.token_types, 0), positions=positions
        )

    def _key_values(self, stack: TransformerStack) -> dict[CacheKey, KVPair]:
        """The keys and values of the virtual tokens, recorded once for as long as no weight of the stack changes."""
        version = [(p.data_ptr(), p._version) for p in stack.parameters()]
        if self.recorded is None or self.recorded[0] != version:
            recording = RecordingCache()
            ids = torch.zeros(1, self.count, dtype=torch.long, device=self.table.device)
            self.adding = True
            try:
                stack.forward(ModelInputs(ids), recording)
            finally:
                self.adding = False
            self.recorded = version, recording.kv
        return self.recorded[1]

    def extra_repr(self) -> str:
        return f"{self.count} tokens"
