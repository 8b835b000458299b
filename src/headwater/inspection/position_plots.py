"""Position encodings measured from their modules: vectors added, rotations, attention biases by distance.

A position encoding may add to the embedding, rotate queries and keys, bias the attention scores, or bias them depending
on the query. All four methods of each are called, and their outputs are the result:

    add         table [P, D]: the vector added at each position; similarity [P, P]: cosine of the rows
    rotate      table [P, D/2]: cos(position · frequency) of each pair; curves: mean cos(distance · frequency), the
                score of equal vectors at that distance
    bias        curves [H, 2P - 1]: the bias by distance (key - query)
    query_bias  curves [H, 2P - 1]: the part of it that does not depend on the query (Transformer-XL)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.modules import eval_mode
from headwater.core.positions import PositionEncoding
from headwater.core.stack import TransformerStack
from headwater.errors import BadSetting
from headwater.i18n import _
from headwater.inspection.inputs import InspectedModel, ModelLike
from headwater.inspection.results import InspectionResult

KINDS = {"add": _("added"), "rotate": _("rotated"), "bias": _("bias"), "query_bias": _("query bias")}


def _empty() -> np.ndarray:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class PositionEffect(InspectionResult):
    """What one position encoding computes. path: of its module. part: its class. kind: add, rotate, bias, query_bias.

    table, similarity, curves: as above, or empty. offsets: the distances (key - query) of the curves.
    """

    path: str
    part: str
    kind: str
    table: np.ndarray = field(default_factory=_empty)
    similarity: np.ndarray = field(default_factory=_empty)
    offsets: np.ndarray = field(default_factory=_empty)
    curves: np.ndarray = field(default_factory=_empty)

    def lines(self) -> list[str]:
        size = _("{num_heads} heads", num_heads=len(self.curves))
        if self.table.size:
            size = _("{positions} positions × {width}", positions=self.table.shape[0], width=self.table.shape[1])
        kind = KINDS[self.kind]
        return [_("{path}: {part}, {kind}; {size}", path=self.path, part=self.part, kind=kind, size=size)]


@dataclass(frozen=True, eq=False)
class PositionEffects(InspectionResult):
    """What each position encoding of a model computes."""

    effects: tuple[PositionEffect, ...]

    def lines(self) -> list[str]:
        return [line for effect in self.effects for line in effect.lines()] or [
            _("this model has no position encoding")
        ]


def position_effects(model: ModelLike, length: int = 64) -> PositionEffects:
    """Every position encoding of a model, over `length` positions (or as many as a learned table has)."""
    if length < 2:
        raise BadSetting(_("positions: length must be at least 2, got {length}; 64 is usual", length=length))
    transformer = InspectedModel.wrap(model).model
    effects: list[PositionEffect] = []
    with eval_mode(transformer):
        for side in ("encoder", "decoder"):
            stack = getattr(transformer, side)
            if stack is None:
                continue
            if isinstance(getattr(stack.embed, "position", None), PositionEncoding):
                effects += _embedding_effects(f"{side}.embed.position", stack, length)
            for n, position in enumerate(stack.position_encodings):
                path = f"{side}.position_encodings.{n}"
                effects += _attention_effects(path, position, _attention_using(stack, n), length)
    return PositionEffects(tuple(effects))


def _attention_using(stack: TransformerStack, position_index: int) -> AttentionLayer | None:
    """The first self-attention layer that uses a position encoding of the stack."""
    for layer in stack.layers:
        for module in layer.modules():
            if not isinstance(module, AttentionLayer) or isinstance(module, CrossAttentionLayer):
                continue
            if stack.mask_groups[module.mask_group].position == position_index:
                return module
    return None


def _embedding_effects(path: str, stack: TransformerStack, length: int) -> list[PositionEffect]:
    """The vectors added to the embedding."""
    embed: Any = stack.embed
    spec: Any = stack.spec.embed
    position = embed.position
    table = getattr(position, "table", None)
    if table is not None:
        length = min(length, table.num_embeddings - position.offset)
    zeros = torch.zeros(1, length, embed.tokens.embedding_dim)
    vectors = position.add(zeros, torch.arange(length)[None])[0]  # [P, D]
    if not vectors.any():
        return []
    unit = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-9)
    part = type(spec.position).__name__
    return [PositionEffect(path, part, "add", vectors.numpy(), (unit @ unit.T).numpy())]


def _attention_effects(
    path: str, position: PositionEncoding, attention: AttentionLayer | None, length: int
) -> list[PositionEffect]:
    """Bias, rotation and query bias in attention."""
    if attention is None:
        return []
    part = type(attention.spec.position).__name__
    q_positions = torch.full((1, 1), length - 1)  # one query in the middle of the keys
    k_positions = torch.arange(2 * length - 1)[None]
    offsets = (k_positions - q_positions)[0].numpy()
    effects = []

    # bias on the scores (ALiBi, T5): [H, offsets]
    if position.has_bias:
        curves = position.bias(q_positions, k_positions)[0, :, 0].float().numpy()
        effects.append(PositionEffect(path, part, "bias", offsets=offsets, curves=curves))

    # rotation (RoPE): the score of equal vectors by distance
    cos_sin = position.cos_sin(torch.arange(length)[None], torch.float32)
    if cos_sin is not None:
        ones = torch.ones(1, 1, length, attention.head_dim)
        q, k = position.rotate(ones, ones, cos_sin)
        scores = (q[0, 0, :1] @ k[0, 0].T) / attention.head_dim
        cos = cos_sin[0][0, 0].float().numpy()
        effects.append(PositionEffect(path, part, "rotate", cos, offsets=np.arange(length), curves=scores.numpy()))
        return effects

    # bias that depends on the query (Transformer-XL): here that of a zero query
    if position.has_query_bias:
        zeros = torch.zeros(1, attention.heads, 1, attention.head_dim)
        query, _key = position.rotate(zeros, zeros, None)
        query_bias = position.query_bias(query, q_positions, k_positions)
        curves = query_bias[0, :, 0].float().numpy() * attention.kernel.scale
        effects.append(PositionEffect(path, part, "query_bias", offsets=offsets, curves=curves))
    return effects
