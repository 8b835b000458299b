"""A stack of Transformer layers: embedding, blocks of residual branches, shared position encodings, a final norm.

One branch:   x ──┬── norm ── layer ── out_norm ── dropout ── + ── post_norm ──
                  └───────────────────────────────────────────┘

Pre-norm fills only `norm`, post-norm (the paper) only `post_norm`, sandwich both `norm` and `out_norm`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headwater.core.attention import Attention, AttentionLayer, CrossAttentionLayer, ForwardContext, MaskGroup
from headwater.core.base import (
    FEATURES,
    BlockSpec,
    BranchLayerSpec,
    EmbeddingSpec,
    NormSpec,
    PositionSpec,
    check_dropout,
    check_positive,
)
from headwater.core.cache import CacheKey, KVCache
from headwater.core.embeddings import ModelInputs, longest_document
from headwater.core.masks import AttentionMask, Bidirectional, MaskRule
from headwater.core.modules import Dropout
from headwater.core.norms import NoNorm
from headwater.core.positions import PositionEncoding
from headwater.errors import BadInput, BadSetting, Fault
from headwater.i18n import _
from headwater.parts import must, part


@part
class Branch:
    """A residual branch: one layer and its norms; role is its name in the block: self_attn, cross_attn, ffn."""

    role: str
    layer: BranchLayerSpec
    norm: NormSpec = NoNorm()
    out_norm: NormSpec = NoNorm()
    post_norm: NormSpec = NoNorm()

    def __post_init__(self) -> None:
        must(self.role.isidentifier(), self, _("role must be a name"), self.role, _("such as self_attn or ffn"))


def pre(norm: NormSpec, **layer: BranchLayerSpec) -> Branch:
    """A pre-norm branch, x + layer(norm(x)): pre(RMSNorm(), ffn=FeedForward(64))."""
    return Branch(*_role_and_layer(layer), norm=norm)


def post(norm: NormSpec, **layer: BranchLayerSpec) -> Branch:
    """A post-norm branch, norm(x + layer(x)): post(LayerNorm(), ffn=FeedForward(64))."""
    return Branch(*_role_and_layer(layer), post_norm=norm)


def sandwich(norm: NormSpec, **layer: BranchLayerSpec) -> Branch:
    """A sandwich-norm branch, x + norm(layer(norm(x))): sandwich(RMSNorm(), ffn=FeedForward(64))."""
    return Branch(*_role_and_layer(layer), norm=norm, out_norm=norm)


def _role_and_layer(layer: dict[str, BranchLayerSpec]) -> tuple[str, BranchLayerSpec]:
    must(
        len(layer) == 1, "Branch", _("one role=layer must be given"), sorted(layer), _("such as ffn=FeedForward(2048)")
    )
    return next(iter(layer.items()))


@part
class Block(BlockSpec):
    """Branches in sequence: each reads the residual stream that the one before it wrote."""

    branches: tuple[Branch, ...]
    dropout: float = 0.0

    def __post_init__(self) -> None:
        roles = [branch.role for branch in self.branches]
        must(
            len(roles) == len(set(roles)) and bool(roles),
            self,
            _("roles must be given and differ"),
            roles,
            _("rename one"),
        )
        check_dropout(self)

    def build(self, d_model: int) -> BlockLayer:
        return BlockLayer(self, d_model)


@part
class Stack:
    """A stack of layers of one width. d_model is given here and nowhere below.

    order: which layer runs at each step, for shared layers (ALBERT); empty means each once, in sequence.
    """

    d_model: int
    embed: EmbeddingSpec
    layers: tuple[BlockSpec, ...]
    final_norm: NormSpec = NoNorm()
    order: tuple[int, ...] = ()
    dropout: float = 0.0

    def __post_init__(self) -> None:
        check_positive(self, "d_model", _("512 is usual"))
        must(len(self.layers) <= 10_000, self, _("there may be at most 10000 layers"), len(self.layers), _("use fewer"))
        known = all(type(i) is int and 0 <= i < len(self.layers) for i in self.order)
        must(
            known,
            self,
            _("order must name layers below {num_layers}", num_layers=len(self.layers)),
            self.order,
            _("correct it"),
        )
        check_dropout(self)

    def build(self) -> TransformerStack:
        return TransformerStack(self)

    @property
    def output_width(self) -> int:
        """The width of the last hidden states."""
        return self.d_model

    @property
    def max_positions(self) -> int | None:
        """The number of learned position embeddings; None: no limit."""
        position = getattr(self.embed, "position", None)
        return None if position is None else position.max_positions


class GroupKey(NamedTuple):
    """What the attention layers of one mask group have in common. position: index of their position encoding."""

    rule: MaskRule
    position: int
    is_recurrent: bool


class ResidualBranch(NamedTuple):
    """The modules of one residual branch."""

    layer: nn.Module
    norm: nn.Module
    out_norm: nn.Module
    post_norm: nn.Module


class BlockLayer(nn.Module):
    """One Transformer layer: x = post_norm(x + dropout(out_norm(layer(norm(x))))) for each branch.

    names: the paths of each branch's modules: role, role_norm, role_out_norm, role_post_norm. branches: the modules.
    """

    def __init__(self, spec: Block, d_model: int) -> None:
        super().__init__()
        roles = [branch.role for branch in spec.branches]
        self.names = [(role, f"{role}_norm", f"{role}_out_norm", f"{role}_post_norm") for role in roles]
        for branch, (layer, norm, out_norm, post_norm) in zip(spec.branches, self.names, strict=True):
            setattr(self, layer, branch.layer.build(d_model))
            setattr(self, norm, branch.norm.build(d_model))
            setattr(self, out_norm, branch.out_norm.build(d_model))
            setattr(self, post_norm, branch.post_norm.build(d_model))
        self.dropout = Dropout(spec.dropout)

    def __setattr__(self, name: str, value: Any) -> None:
        """As nn.Module. A child that is replaced, by an adapter or a quantized layer, is replaced in `branches` too."""
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            complete = [names for names in self.names if names[-1] in self._modules]
            self.branches = [ResidualBranch(*map(self.get_submodule, names)) for names in complete]

    def forward(self, x: Tensor, context: ForwardContext, step: int) -> Tensor:
        """x [B, Q, D] -> [B, Q, D]"""
        for branch in self.branches:
            y = branch.out_norm(branch.layer(branch.norm(x), context, step))
            x = branch.post_norm(x, y, self.dropout.rate)  # post_norm(x + dropout(y))
        return x


class TransformerStack(nn.Module):
    """Embedding, layers and final norm.

    position_encodings: those of the attention layers, shared where equal. mask_groups: the keys of mask groups that
    occur; each attention layer knows the index of its group. unsupported: what some layer cannot honour (see FEATURES).
    groups_with_tensor: those of which a layer needs the mask as a tensor.
    gradient_checkpointing: recompute the activations of each layer in the backward pass instead of storing them.
    """

    def __init__(self, spec: Stack) -> None:
        super().__init__()
        self.spec = spec
        self.gradient_checkpointing = False
        self.embed = spec.embed.build(spec.d_model)
        self.layers = nn.ModuleList(layer.build(spec.d_model) for layer in spec.layers)
        self.order = spec.order or tuple(range(len(spec.layers)))
        self.position_encodings = nn.ModuleList()
        self.mask_groups: list[GroupKey] = []
        self.unsupported: dict[str, Attention] = {}  # by the names in FEATURES, the first that cannot honour it
        self.groups_with_tensor: set[int] = set()
        self._share_positions()
        self.final_norm = spec.final_norm.build(spec.output_width)
        self.dropout = Dropout(spec.dropout)
        self.no_position = PositionEncoding()

    def _share_positions(self) -> None:
        """Build one position encoding for all attention layers with equal spec and heads, such as T5's table."""
        keys: list[tuple[PositionSpec, int, int]] = []  # of self.position_encodings
        for layer in self.layers:
            for attn_index, attention in enumerate(_attention_layers(layer)):
                attention.attn_index = attn_index
                for feature in attention.spec.unsupported:
                    self.unsupported.setdefault(feature, attention.spec)
                if isinstance(attention, CrossAttentionLayer):
                    continue

                # the position encoding: that of an earlier layer, or a new one
                position = attention.spec.position
                key = (position, attention.head_dim, attention.heads)
                if key not in keys or not position.shared:
                    keys.append(key)
                    self.position_encodings.append(position.build(attention.head_dim, attention.heads))
                index = keys.index(key) if position.shared else len(keys) - 1
                encoding = cast(PositionEncoding, self.position_encodings[index])
                if "bias" in attention.spec.unsupported and (encoding.has_bias or encoding.has_query_bias):
                    _refuse("bias", attention.spec, BadSetting)

                # the mask group
                group = GroupKey(attention.spec.mask, index, attention.is_recurrent)
                if group not in self.mask_groups:
                    self.mask_groups.append(group)
                attention.mask_group = self.mask_groups.index(group)
                if attention.needs_mask_tensor:
                    self.groups_with_tensor.add(attention.mask_group)

    def own_encodings(self, layer: nn.Module) -> list[PositionEncoding]:
        """The position encodings of this layer alone: PositionSpec.shared is false."""
        attentions = [a for a in _attention_layers(layer) if not isinstance(a, CrossAttentionLayer)]
        indices = [self.mask_groups[a.mask_group].position for a in attentions if not a.spec.position.shared]
        return [cast(PositionEncoding, self.position_encodings[index]) for index in indices]

    @property
    def uses_global_tokens(self) -> bool:
        """Whether an attention layer reads ModelInputs.global_tokens."""
        return any(attention.uses_global_tokens for layer in self.layers for attention in _attention_layers(layer))

    def require(self, feature: str, fault: type[Fault] = BadInput) -> None:
        """Refuse a feature that some attention layer cannot honour, and say what to do instead."""
        if feature in self.unsupported:
            _refuse(feature, self.unsupported[feature], fault)

    def _check_inputs(self, inputs: ModelInputs, cache: KVCache) -> None:
        """Refuse inputs that some attention layer cannot honour."""
        if not self.unsupported or torch.compiler.is_compiling():
            return
        if cache.spec is not None:
            self.require("cache")
        if inputs.document_ids is not None:
            self.require("packing")
        mask = inputs.attention_mask
        if mask is not None and not mask.is_meta and not mask.all():
            self.require("padding")
            if not mask[:, 0].equal(mask.any(1)):
                self.require("left_padding")

    def kv_shapes(self, mask_group: int) -> dict[CacheKey, tuple[int, int, int]]:
        """The entries of a KV cache for one mask group: (step, attn_index) -> (kv_heads, head_dim, v_head_dim)."""
        shapes = {}
        for step, index in enumerate(self.order):
            for layer in _attention_layers(self.layers[index]):
                if layer.mask_group == mask_group and not isinstance(layer, CrossAttentionLayer):
                    shapes[layer.cache_key(step)] = layer.kv_heads, layer.head_dim, layer.v_head_dim
        return shapes

    def forward(self, inputs: ModelInputs, cache: KVCache, memory: ModelInputs | None = None) -> Tensor:
        """The last hidden states [B, Q, D]; cross-attention reads memory.hidden_states [B, S, D]."""
        # the embedding
        self._check_inputs(inputs, cache)
        positions = inputs.positions_from(cache.seen_tokens)
        aligned = cache.aligned and inputs.positions is None and inputs.contiguous_mask
        x = self.embed(inputs, positions)

        # the masks and rotary tables of each mask group
        groups = []
        documents = inputs.document_ids
        longest = longest_document(documents) if documents is not None and aligned else None
        for number, (rule, index, _is_recurrent) in enumerate(self.mask_groups):
            k_positions, attention_mask = cache.update_positions(number, positions, inputs.attention_mask)
            encoding = cast(PositionEncoding, self.position_encodings[index])
            mask = AttentionMask(
                rule, encoding, positions, k_positions, attention_mask, documents, documents, aligned, longest
            )
            groups.append(MaskGroup.build(mask, positions, x.dtype, number in self.groups_with_tensor))
        cache.advance(positions.shape[1], inputs.attention_mask)
        if memory is None:
            context = ForwardContext(tuple(groups), cache, inputs)
        else:
            cross_group = self._cross_group(positions, inputs, memory, x.dtype)
            context = ForwardContext(tuple(groups), cache, inputs, memory.hidden_states, cross_group)

        return self.dropout(self.final_norm(self.run_layers(x, context)))

    def run_layers(self, x: Tensor, context: ForwardContext) -> Tensor:
        """x [B, Q, D] -> [B, Q, output width]. A KV cache must not be updated twice: with one nothing is recomputed."""
        recompute = self.gradient_checkpointing and torch.is_grad_enabled() and context.cache.spec is None
        for step, index in enumerate(self.order):
            layer = self.layers[index]
            if recompute:
                x = checkpoint(layer, x, context, step, use_reentrant=False)
            else:
                x = layer(x, context, step)
        return x

    def _cross_group(
        self, positions: Tensor, inputs: ModelInputs, memory: ModelInputs, dtype: torch.dtype
    ) -> MaskGroup:
        """The mask of cross-attention: every source token but padding and, where packed, of the same document."""
        assert memory.hidden_states is not None
        k_positions = torch.arange(memory.hidden_states.shape[1], device=positions.device)[None]
        mask = AttentionMask(
            Bidirectional(),
            self.no_position,
            positions,
            k_positions,
            memory.attention_mask,
            inputs.document_ids,
            memory.document_ids,
        )
        return MaskGroup.build(mask, positions, dtype)


def _refuse(feature: str, attention: Attention, fault: type[Fault]) -> None:
    name = type(attention.kernel if feature in attention.kernel.unsupported else attention).__name__
    hint = attention.unsupported[feature]
    raise fault(_("{name} cannot be used with {feature}; {hint}", name=name, feature=FEATURES[feature], hint=hint))


def _attention_layers(block: nn.Module) -> list[AttentionLayer]:
    return [module for module in block.modules() if isinstance(module, AttentionLayer)]
