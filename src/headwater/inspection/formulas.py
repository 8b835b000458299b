"""Counts as formulas: a tensor of shape [d_ff, d_model] is the term d_ff·d_model, a part is the sum of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from headwater.core.attention import AttentionLayer

Sizes = Mapping[str, int]  # what each letter of a formula stands for, the first that fits a number gives it its name
Term = tuple[str, ...]  # the factors of a product, in ORDER

# Where the name of a module says what a dimension of its weight is.
KNOWN = {
    ("tokens", 0): "vocab",
    ("kinds", 0): "kinds",
    ("table", 0): "places",
    ("buckets", 0): "buckets",
    ("up", 0): "d_ff",
    ("gate", 0): "d_ff",
    ("down", 1): "d_ff",
}
ORDER = ("vocab", "places", "kinds", "buckets", "d_model", "d_ff", "heads", "kv_heads", "head_dim", "v_head_dim")
POWERS = {1: "", 2: "²", 3: "³"}


def sizes_of(module: Any, sizes: Sizes) -> Sizes:
    """What is known inside this module: the sizes handed down to it, and its own."""
    own: dict[str, int] = {}
    spec: Any = getattr(module, "spec", None)
    writer: Any = getattr(module, "writer", None)
    if isinstance(module, AttentionLayer):
        h, g, k, v = module.heads, module.kv_heads, module.head_dim, module.v_head_dim
        own = {
            "heads·head_dim": h * k,
            "kv_heads·head_dim": g * k,
            "heads·v_head_dim": h * v,
            "kv_heads·v_head_dim": g * v,
        }
        own |= {"head_dim": k}
    elif hasattr(spec, "d_model"):
        return {"d_model": spec.d_model}
    elif writer is not None:
        own = {"d_model": writer.spec.d_model}
    return {**sizes, **{name: size for name, size in own.items() if name not in sizes}}


def term(name: str, shape: tuple[int, ...], sizes: Sizes) -> tuple[int, Term]:
    """One tensor as number · factors; a dimension without a name goes into the number."""
    number, factors = 1, []
    for axis, size in enumerate(shape):
        called = KNOWN.get((name, axis)) if sizes else None
        called = called or next((known for known, its in sizes.items() if its == size), None)
        if called is None:
            number *= size
        else:
            factors += called.split("·")
    return number, tuple(sorted(factors, key=ORDER.index))


def written(terms: Counter[Term]) -> str:
    """4·d_model² + 4·d_model: the largest powers first; empty where there is no letter to write."""
    if not any(terms):
        return ""
    order = sorted((t for t in terms if terms[t]), key=_rank)
    return " + ".join("·".join(([str(terms[t])] if terms[t] != 1 or not t else []) + _powers(t)) for t in order)


def _rank(factors: Term) -> tuple[int, list[int]]:
    return -len(factors), [ORDER.index(name) for name in factors]


def _powers(factors: Term) -> list[str]:
    return [name + POWERS.get(n, f"^{n}") for name, n in Counter(factors).items()]


def letters(model: nn.Module) -> dict[str, list[int]]:
    """What the names in the formulas stand for in this model; more than one number where its parts differ."""
    found: dict[str, set[int]] = {
        name: set() for name in ("d_model", "d_ff", "heads", "kv_heads", "head_dim", "v_head_dim")
    }
    found |= {name: set() for name in ("vocab", "places", "kinds", "buckets", "layers")}
    for path, module in model.named_modules():
        name = "buckets" if ".positions." in path else path.rpartition(".")[2]
        if isinstance(module, AttentionLayer):
            for size in ("heads", "kv_heads", "head_dim", "v_head_dim"):
                found[size].add(getattr(module, size))
        elif isinstance(module, nn.Linear | nn.Embedding) and (name, 0) in KNOWN:
            found[KNOWN[name, 0]].add(module.weight.shape[0])
        elif hasattr(getattr(module, "spec", None), "d_model"):
            found["d_model"].add(module.spec.d_model)
            found["layers"].add(len(module.layers))
    if found["v_head_dim"] == found["head_dim"]:
        del found["v_head_dim"]
    return {name: sorted(sizes) for name, sizes in found.items() if sizes}
