"""A walk through one layer and one head with the model's own numbers, formula by formula, for a few tokens.

Everything is heard while the model runs; what is worked out beside it (scores, mask, softmax, mixed values) is held
against what the model made of it, so the walk never shows a number that the model did not use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwater.errors import BadInput
from headwater.inspection.results import plain
from headwater.inspection.scores import language, says_tokens
from headwater.inspection.subjects import Reading, still
from headwater.inspection.words import Both
from headwater.serving.asking import Step, reading_of
from headwater.serving.shelf import Opened
from headwater.serving.tracing import labels

MOST_TOKENS, MOST_WIDTH = 12, 16


def walk(opened: Opened, ask: Step) -> dict[str, Any]:
    reading = _short(reading_of(opened, ask))
    model: Any = reading.model
    side = "decoder" if model.decoder is not None else "encoder"
    stack = getattr(model, side)
    if not 0 <= ask.layer < len(stack.order):
        n = len(stack.order)
        raise BadInput(Both(f"the {side} has {n} layers, got {ask.layer}", f"它有 {n} 层,得到 {ask.layer}"))
    block = stack.layers[stack.order[ask.layer]]
    attention = block.self_attn
    if not 0 <= ask.head < attention.heads:
        n = attention.heads
        raise BadInput(Both(f"the layer has {n} heads, got {ask.head}", f"这一层有 {n} 个头,得到 {ask.head}"))
    heard = _heard(reading, stack, block, stack.order[: ask.layer].count(stack.order[ask.layer]))
    steps = [*_embedding(reading, stack), *_attention(attention, heard, ask.head), *_rest(block, heard)]
    facts = {"side": side, "layers": len(stack.order), "heads": attention.heads, "head_dim": attention.head_dim}
    facts |= {"d_model": stack.spec.d_model, "scale": round(attention.kernel.scale, 6)}
    return {"tokens": labels(reading.tokens), "facts": facts, "steps": steps, "output": _output(reading)}


def _short(reading: Reading) -> Reading:
    """The first tokens only: a walk is for reading numbers."""
    cut = {name: getattr(reading, name)[:MOST_TOKENS] for name in ("tokens", "source", "follows")}
    return replace(reading, **cut)


def table(name: str, x: Tensor, rows: str = "tokens", columns: str = "dims") -> dict[str, Any]:
    """A matrix as the page draws it: all of it if it is small, else its first columns; shape says how large it is."""
    shown = x.detach().float()[:, : MOST_WIDTH if columns == "dims" else None]
    return {"name": name, "shape": list(x.shape), "rows": rows, "columns": columns, "values": plain(shown.numpy())}


# -------------------------------------------------------------------------------------------------------- what is heard


def _heard(reading: Reading, stack: Any, block: Any, nth: int) -> dict[str, Any]:
    """Inputs and outputs of the block's modules, at the nth time they run (more than once only for shared layers)."""
    found: dict[str, list[Any]] = {}
    modules = {name: module for name, module in block.named_modules() if name}
    with still(reading.model), torch.inference_mode(), contextlib.ExitStack() as hooks:
        for name, module in {**modules, "block": block}.items():
            hooks.enter_context(_listening(module, found.setdefault(name, [])))
        reading.states()
    return {name: calls[nth] for name, calls in found.items() if len(calls) > nth}


@contextlib.contextmanager
def _listening(module: Any, calls: list[Any]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda m, inputs, output: calls.append((inputs, output)))
    try:
        yield
    finally:
        handle.remove()


# ------------------------------------------------------------------------------------------------------------ the steps


def _embedding(reading: Reading, stack: Any) -> list[dict[str, Any]]:
    """Token vectors as they are looked up and scaled, then with what the position adds."""
    embed = stack.embed
    places = torch.arange(len(reading.tokens))[None]
    with torch.inference_mode():
        looked = embed.tokens(reading.ids)[0] * embed.scale
        moved = embed.position.add(looked[None], places)[0] - looked
        rows = reading.model.rows(reading.ids, None, None, None, None)
        with still(reading.model):
            x = embed(rows, places)[0]
    position = type(stack.spec.embed.position).__name__
    return [
        {"step": "embedding", "scale": round(embed.scale, 4), "tables": [table("E", looked)]},
        {"step": "position", "kind": position, "tables": [table("P", moved), table("x", x)]},
    ]


def _attention(attention: Any, heard: dict[str, Any], head: int) -> list[dict[str, Any]]:
    (x, *_), _ = heard["self_attn"]
    (q, k, v, sight, *_), mixed = heard["self_attn.kernel"]
    kernel, group = attention.kernel, head * attention.kv_heads // attention.heads
    mine, key, value = q[0, head], k[0, group], v[0, group]
    scores = kernel.shaped(kernel.scale * (mine @ key.mT))
    mask = kernel.dense(q, sight)
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else _row(mask, head)
    allowed = seen if seen.dtype == torch.bool else seen > -torch.inf
    biased = scores if seen.dtype == torch.bool else scores + seen.masked_fill(~allowed, 0)
    hidden = biased.masked_fill(~allowed, -torch.inf)
    weights = torch.nan_to_num(hidden.softmax(-1))
    together = mixed[0].transpose(0, 1).flatten(1)
    kind = type(attention.spec.position).__name__
    square = {"rows": "tokens", "columns": "tokens"}
    return [
        {"step": "qkv", "turned": kind, "tables": [table("q", mine), table("k", key), table("v", value)],
         "read": table("x", x[0])},
        {"step": "scores", "tables": [table("S", scores, **square)]},
        {"step": "mask", "sees": type(attention.spec.sees).__name__, "tables": [table("M", allowed.float(), **square)]},
        {"step": "softmax", "tables": [table("A", weights, **square)]},
        {"step": "values", "tables": [table("A v", weights @ value)], "same": _same(weights @ value, mixed[0, head])},
        {"step": "heads", "tables": [table("concat", together), table("out", heard["self_attn.out"][1][0])]},
    ]  # fmt: skip


def _row(mask: Tensor, head: int) -> Tensor:
    """[Q, S] of a mask that may be [Q, S] or [B|1, H|1, Q, S]."""
    while mask.dim() > 2:
        mask = mask[head if mask.dim() == 3 and mask.shape[0] > 1 else 0]
    return mask


def _rest(block: Any, heard: dict[str, Any]) -> list[dict[str, Any]]:
    """What happens to the stream after attention: the norms, another stack's memory, the feed-forward layer."""
    norms = {
        name: type(getattr(block, name)).__name__ for name in dict(block.named_children()) if name.endswith("norm")
    }
    placed = [name for name, kind in norms.items() if name.startswith("self_attn") and kind != "Identity"]
    (x, *_), after = heard["block"]
    steps: list[dict[str, Any]] = [
        {"step": "add_norm", "norms": placed, "tables": [table("x", x[0]), *_after(heard, placed)]}
    ]
    if "cross_attn" in heard:
        steps.append({"step": "cross", "tables": [table("out", heard["cross_attn"][1][0])]})
    if "ffn.up" in heard:
        up, down = heard["ffn.down"][0][0], heard["ffn"][1]
        gate = "ffn.gate" in heard
        steps.append({"step": "ffn", "gated": gate, "tables": [table("hidden", up[0]), table("ffn", down[0])]})
    return [*steps, {"step": "block", "tables": [table("y", after[0])]}]


def _after(heard: dict[str, Any], placed: list[str]) -> list[dict[str, Any]]:
    return [table(name, heard[name][1][0]) for name in placed if name in heard]


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-3, atol=1e-4))


def _output(reading: Reading) -> list[dict[str, Any]]:
    """The most probable tokens at the last place, where the model has a head that says tokens."""
    if not says_tokens(reading.model):
        return []
    with still(reading.model), torch.inference_mode():
        states, rows = reading.states()
        shares = language(reading.model)(states[:, -1:], rows)[0, 0].float().softmax(-1)
    top = shares.topk(min(8, len(shares)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [{**labels([reading.name(i)])[0], "share": plain(p)} for i, p in pairs]
