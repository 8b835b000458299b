"""Parameter counts as formulas: a tensor [d_ff, d_model] is the term d_ff·d_model, a module the sum of its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from headwater.core.attention import AttentionLayer

Dimensions = Mapping[str, int]  # symbol -> size; a dimension gets the first symbol of its size
Term = tuple[str, ...]  # the factors of a product, in FACTOR_ORDER

# (module name, axis of its weight) -> symbol
DIMENSION_NAMES = {
    ("tokens", 0): "vocab",
    ("token_types", 0): "token_types",
    ("table", 0): "positions",
    ("buckets", 0): "buckets",
    ("up", 0): "d_ff",
    ("gate", 0): "d_ff",
    ("down", 1): "d_ff",
}
SIZES = ("d_model", "d_ff", "heads", "kv_heads", "head_dim", "v_head_dim")
TABLES = ("vocab", "positions", "token_types", "buckets")
FACTOR_ORDER = (*TABLES, *SIZES)
POWERS = {1: "", 2: "²", 3: "³"}


def known_dimensions(module: Any, dimensions: Dimensions) -> Dimensions:
    """The symbols of the dimensions inside a module: those of its parents, and its own."""
    sizes: dict[str, int] = {}
    spec: Any = getattr(module, "spec", None)
    output_stack: Any = getattr(module, "output_stack", None)
    if isinstance(module, AttentionLayer):
        h = module.heads
        g = module.kv_heads
        k = module.head_dim
        v = module.v_head_dim
        sizes = {
            "heads·head_dim": h * k,
            "kv_heads·head_dim": g * k,
            "heads·v_head_dim": h * v,
            "kv_heads·v_head_dim": g * v,
            "head_dim": k,
        }
    elif hasattr(spec, "d_model"):
        return {"d_model": spec.d_model}
    elif output_stack is not None:
        sizes = {"d_model": output_stack.spec.d_model}
    return {**dimensions, **{name: size for name, size in sizes.items() if name not in dimensions}}


def tensor_term(name: str, shape: tuple[int, ...], dimensions: Dimensions) -> tuple[int, Term]:
    """The size of a tensor as number · factors; a dimension without a symbol is multiplied into the number."""
    number = 1
    factors: list[str] = []
    for axis, size in enumerate(shape):
        symbol = DIMENSION_NAMES.get((name, axis)) if dimensions else None
        symbol = symbol or next((known for known, known_size in dimensions.items() if known_size == size), None)
        if symbol is None:
            number *= size
        else:
            factors += symbol.split("·")
    return number, tuple(sorted(factors, key=FACTOR_ORDER.index))


def format_formula(terms: Counter[Term]) -> str:
    """A sum of terms as 4·d_model² + 4·d_model, the largest powers first; "" if there is no symbol in it."""
    if not any(terms):
        return ""
    products = []
    for term in sorted((term for term in terms if terms[term]), key=_sort_key):
        number = [str(terms[term])] if terms[term] != 1 or not term else []
        products.append("·".join(number + _with_exponents(term)))
    return " + ".join(products)


def _sort_key(factors: Term) -> tuple[int, list[int]]:
    return -len(factors), [FACTOR_ORDER.index(name) for name in factors]


def _with_exponents(factors: Term) -> list[str]:
    return [name + POWERS.get(n, f"^{n}") for name, n in Counter(factors).items()]


def symbol_values(model: nn.Module) -> dict[str, list[int]]:
    """The sizes of the symbols in a model's formulas; more than one if its modules differ."""
    values: dict[str, set[int]] = {name: set() for name in (*SIZES, *TABLES, "layers")}
    for path, module in model.named_modules():
        name = "buckets" if ".position_encodings." in path else path.rpartition(".")[2]
        if isinstance(module, AttentionLayer):
            for size in ("heads", "kv_heads", "head_dim", "v_head_dim"):
                values[size].add(getattr(module, size))
        elif isinstance(module, nn.Linear | nn.Embedding) and (name, 0) in DIMENSION_NAMES:
            values[DIMENSION_NAMES[name, 0]].add(module.weight.shape[0])
        elif hasattr(getattr(module, "spec", None), "d_model"):
            values["d_model"].add(module.spec.d_model)
            values["layers"].add(len(module.layers))
    if values["v_head_dim"] == values["head_dim"]:
        del values["v_head_dim"]
    return {name: sorted(sizes) for name, sizes in values.items() if sizes}
