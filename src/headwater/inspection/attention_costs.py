"""The cost of every attention that can be chosen by name, at one length, by formula: for `headwater show --length N`.

    FLOPs of a layer = length · 2 · heads · (head_dim + v_head_dim) · keys

keys is the number of keys that a query is compared with. Linear attention, Performer and Linformer compare with none:
theirs is the number that would cost as much. In decoding a layer keeps keys and values, those of a window, or a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.core.attention import Attention, AttentionLayer
from headwater.core.masks import Bidirectional, Causal
from headwater.core.model import Transformer
from headwater.errors import BadSetting
from headwater.families.attentions import ATTENTIONS, attention_sizes, choose_attention

FORMULAS = {
    "full": "n",
    "window": "size",
    "linear": "head_dim + 64",
    "performer": "2·features + 64",
    "xl": "2·memory",
    "longformer": "window + 1",
    "bigbird": "(5 + random)·block",
    "longt5": "2·radius + n/block",
    "lsh": "2·chunk·rounds",
    "reformer": "2·chunk, 2·chunk·rounds",
    "linformer": "2·features",
}


@dataclass(frozen=True)
class AttentionCost:
    """One attention in a layer of a model. flops: of a forward pass over all tokens; None: not for this stack.

    cached: elements that a layer keeps of one sequence in decoding; None: it has no cache.
    """

    name: str
    formula: str
    keys: int | None
    flops: int | None
    cached: int | None


def compare_attentions(model: Transformer, length: int) -> list[AttentionCost]:
    """What each attention would cost in a layer of this model's output stack."""
    layer = next((m for m in model.output_stack.modules() if isinstance(m, AttentionLayer)), None)
    if layer is None:
        return []
    is_causal = layer.spec.mask.window_size[1] == 0
    sizes = layer.heads, layer.kv_heads, layer.head_dim, layer.v_head_dim
    plain = Attention(*sizes, mask=Causal() if is_causal else Bidirectional())
    return [_cost(name, plain, is_causal, length) for name in ATTENTIONS]


def _cost(name: str, plain: Attention, is_causal: bool, length: int) -> AttentionCost:
    formula = FORMULAS.get(name, "")
    sizes = ",".join(f"{size}={default}" for size, default in attention_sizes(name).items() if size in formula)
    label = f"{name}:{sizes}" if sizes else name
    try:
        chosen = choose_attention(name, plain, is_causal)
    except BadSetting:  # an encoder's attention in a decoder, or the reverse
        return AttentionCost(label, formula, None, None, None)
    keys = sum(equivalent_keys(attention, length) for attention in chosen) // len(chosen)
    head_dim, v_head_dim = head_dims(plain)
    flops = length * 2 * plain.heads * (head_dim + v_head_dim) * keys
    cached = [cached_elements(attention, length) for attention in chosen]
    kept = None if not is_causal or None in cached else sum(size or 0 for size in cached) // len(cached)
    return AttentionCost(label, formula, keys, flops, kept)


def head_dims(attention: Attention) -> tuple[int, int]:
    """The widths of a key head and of a value head, of a spec that gives them."""
    head_dim = attention.head_dim or 0
    return head_dim, attention.v_head_dim or head_dim


def equivalent_keys(attention: Attention, length: int) -> int:
    """The keys that a query is compared with, or the number that would cost as much."""
    keys = attention.keys_per_query(length)
    return attention.kernel.equivalent_keys(keys, head_dims(attention)[0])


def cached_elements(attention: Attention, length: int) -> int | None:
    """Elements that a layer keeps of one sequence in decoding; None: it has no cache."""
    if "cache" in attention.unsupported:
        return None
    kv_heads = attention.kv_heads or attention.heads
    head_dim, v_head_dim = head_dims(attention)
    state = attention.kernel.state_elements(head_dim, v_head_dim)
    if state is not None:
        return kv_heads * state
    back, _ahead = attention.mask.window_size
    return kv_heads * (head_dim + v_head_dim) * (length if back is None else min(length, back + 1))
