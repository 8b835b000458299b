"""What a model costs before it exists: bytes and floating-point operations, in closed form from its skeleton.

weights       parameters · width                      width: 4 bytes for fp32, 2 for bf16 and fp16
gradients     parameters · width
optimiser     AdamW: two fp32 moments a parameter, and an fp32 copy of the weights where they are kept in 16 bits
activations   an estimate of what training keeps for the way back (see `kept`)
KV cache      exact: batch · length · width · Σ over attention layers of kv_heads · (head_dim + v_head_dim)
operations    exact for matrix products: 2 a weight; attention 2 · heads · (head_dim + v_head_dim) a query and key
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import nn

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.feedforward import FeedForwardLayer, GatedFeedForwardLayer
from headwater.core.model import Model, Transformer
from headwater.core.stack import BlockLayer
from headwater.errors import BadSetting, TooLong, nearest
from headwater.inspection.counts import Node, groups, skeleton, total, tree
from headwater.inspection.formulas import letters
from headwater.machine.build import missing

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}
USUAL_LENGTH = 1024


@dataclass(frozen=True)
class Count:
    """A model counted: its tree, its parameters by group, and its costs at one batch, length and dtype."""

    tree: Node
    parameters: int
    groups: dict[str, int]
    letters: dict[str, list[int]]
    at: dict[str, Any]
    bytes: dict[str, int]
    flops: dict[str, int]

    def plain(self) -> dict[str, Any]:
        numbers = {"parameters": self.parameters, "groups": self.groups, "letters": self.letters, "at": self.at}
        return {**numbers, "bytes": self.bytes, "flops": self.flops, "tree": self.tree.plain()}


def count(model: Model | Transformer, batch: int = 1, length: int | None = None, dtype: str = "fp32") -> Count:
    """Everything `headwater show` prints. Both stacks read `length` tokens; nothing is allocated."""
    if dtype not in WIDTHS:
        raise BadSetting(f"dtype must be one of {', '.join(WIDTHS)}, got {dtype!r}; {nearest(dtype, WIDTHS)}")
    if batch < 1 or (length is not None and length < 1):
        raise BadSetting(f"batch and length must be at least 1, got {batch} and {length}; correct them")
    built: Any = skeleton(model) if isinstance(model, Model) else model
    if not isinstance(built, Transformer):
        raise BadSetting(
            f"count takes a model or spec of ours, got {type(model).__name__}; counts.tree takes any module"
        )
    length = _fitting(built.spec, length)
    return Count(
        tree=tree(built),
        parameters=total(built),
        groups=groups(built),
        letters=letters(built),
        at={"batch": batch, "length": length, "dtype": dtype},
        bytes=memory(built, batch, length, WIDTHS[dtype]),
        flops=operations(built, length),
    )


def _fitting(spec: Model, length: int | None) -> int:
    room = longest(spec)
    if length is not None and room is not None and length > room:
        raise TooLong(f"length: the position table has {room} places, got {length}; give at most {room}")
    return length if length is not None else min(USUAL_LENGTH, room or USUAL_LENGTH)


def longest(spec: Model) -> int | None:
    """The number of places, where a learned table sets a limit."""
    stacks = [stack for stack in (spec.encoder, spec.decoder) if stack is not None]
    positions: list[Any] = [getattr(stack.embed, "position", None) for stack in stacks]
    rooms = [p.size - p.first for p in positions if hasattr(p, "size") and hasattr(p, "first")]
    return min(rooms, default=None)


# -------------------------------------------------------------------------------------------------------------- bytes


def memory(model: Transformer, batch: int, length: int, width: int) -> dict[str, int]:
    parameters, tokens = total(model), batch * length
    return {
        "weights": parameters * width,
        "gradients": parameters * width,
        "optimiser": parameters * (8 if width == 4 else 12),
        "activations": tokens * (width * kept(model) + 4 * _answers(model)),
        "kv cache": batch * width * cached(model, length),
    }


def kept(model: Transformer) -> int:
    """Numbers that training keeps for one token, in each stack it passes.

    A linear layer keeps its input; q, k and v share one. A norm keeps its result, which the layer after it keeps anyway
    (where nothing is compiled, its input too). Fused attention keeps q, k, v and its result, which is what `out` keeps.
    An activation keeps its input, a product both factors, a dropout its mask (none, where it is compiled). Attention
    that is not fused (some back ends do not fuse dropout) keeps heads · length numbers a layer more.
    """
    return sum(_kept_here(module) for part in _run(model) for module in part.modules())


def _kept_here(module: nn.Module) -> int:
    match module:
        case AttentionLayer():
            h, g, k, v = module.heads, module.kv_heads, module.head_dim, module.v_head_dim
            return h * k + g * (k + v) - 2 * module.q.in_features
        case GatedFeedForwardLayer():
            return 3 * module.up.out_features - module.up.in_features + _masked(module.dropout, module.up)
        case FeedForwardLayer():
            quiet = module.act.__name__ == "relu"  # it keeps its result, which is what `down` keeps
            return (0 if quiet else module.up.out_features) + _masked(module.dropout, module.up)
        case BlockLayer():
            branches = [getattr(module, role) for role, *_ in module.names]
            return sum(
                _masked(module.dropout, getattr(branch, "out", getattr(branch, "down", None))) for branch in branches
            )
        case nn.Linear():
            return module.in_features
        case nn.LayerNorm() | nn.RMSNorm():
            return module.normalized_shape[0] if missing() else 0
    return 0


def _masked(dropout: nn.Dropout, writes: Any) -> int:
    """The numbers of a dropout's mask on what a linear layer writes."""
    return writes.out_features if dropout.p and isinstance(writes, nn.Linear) else 0


def _answers(model: Transformer) -> int:
    """The loss works on fp32 scores: their logarithms are kept, and their gradient is made while they are."""
    return 2 * getattr(model.spec.head, "vocab", 0)


def cached(model: Transformer, length: int) -> int:
    """Numbers a growing cache holds for a row: keys and values of self-attention and of what cross-attention reads."""
    if model.decoder is None:
        return 0
    own = sum(g * (k + v) for lane in range(len(model.decoder.lanes)) for g, k, v in model.decoder.slots(lane).values())
    read = sum(a.kv_heads * (a.head_dim + a.v_head_dim) for a in _attentions(model) if _crosses(a))
    return length * own + _memory_length(model, length) * read


def _memory_length(model: Transformer, length: int) -> int:
    return -(-length // getattr(model.spec.bridge, "factor", 1))


# --------------------------------------------------------------------------------------------------------- operations


def operations(model: Transformer, length: int) -> dict[str, int]:
    """Per token of text: a target token, and for two stacks a source token with it. Training is forward three times.

    Attention is counted over all keys the rule lets a place see at this length, none skipped for causality: a fused
    kernel may do half of it.
    """
    products = 2 * sum(m.in_features * m.out_features for part in _run(model) for m in part.modules() if _is_linear(m))
    fewer = length - _memory_length(model, length)  # tokens the bridge spares the keys and values of cross-attention
    spared = 2 * sum(a.q.in_features * (a.k.out_features + a.v.out_features) for a in _attentions(model) if _crosses(a))
    linear = products - spared * fewer // length
    pairs = sum(2 * a.heads * (a.head_dim + a.v_head_dim) * _keys(a, model, length) for a in _attentions(model))
    return {"linear": linear, "attention": pairs, "forward": linear + pairs, "training": 3 * (linear + pairs)}


def _keys(attention: AttentionLayer, model: Transformer, length: int) -> int:
    if _crosses(attention):
        return _memory_length(model, length)
    back, ahead = attention.spec.sees.reach
    return length if back is None or ahead is None else min(length, back + ahead + 1)


def _run(model: Transformer) -> Iterator[nn.Module]:
    """The modules one token passes, shared layers once for each time they run."""
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            yield from (stack.embed, *(stack.layers[index] for index in stack.order), stack.final_norm)
    yield model.head


def _attentions(model: Transformer) -> Iterator[AttentionLayer]:
    return (m for part in _run(model) for m in part.modules() if isinstance(m, AttentionLayer))


def _crosses(attention: nn.Module) -> bool:
    return isinstance(attention, CrossAttentionLayer)


def _is_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear)
