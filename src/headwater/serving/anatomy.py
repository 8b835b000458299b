"""What a model is: in a few facts, as a tree of parts with formulas and bytes, block by block, and its positions."""

from __future__ import annotations

from typing import Any

from headwater.core.norms import NoNorm
from headwater.inspection.check import LAWS
from headwater.inspection.costs import count
from headwater.inspection.counts import skeleton, total
from headwater.inspection.scores import says_tokens
from headwater.serving.asking import OfText, reading_of
from headwater.serving.shelf import Item, Opened
from headwater.serving.tracing import labels
from headwater.text.tokenizer import Tokenizer
from headwater.training.journals import read_lines


def about(opened: Opened) -> dict[str, Any]:
    """The facts the page needs to say what this is, and which views make sense."""
    subject, model = opened.subject, opened.subject.model
    tokenizer, config = subject.tokenizer, getattr(opened.given, "config", {})
    sizes = {"d_model": model.writer.spec.d_model, "layers": _layers(model), "vocab": model.writer.spec.embed.vocab}
    return {
        "name": opened.item.name,
        "kind": opened.item.kind,
        "shape": opened.shape,
        "family": str(config.get("model_type") or "headwater"),
        "parameters": total(skeleton(model.spec)),  # a quantised model holds its weights in another form
        **sizes,
        "heads": _first(model.writer).layer.heads,
        "head": type(model.spec.head).__name__,
        "says_tokens": says_tokens(model),
        "task": subject.about.get("task", ""),
        "labels": list(subject.labels)[:50],
        "pieces": len(tokenizer) if tokenizer is not None else 0,
        "chats": bool(tokenizer is not None and tokenizer.chat_template),
        "mask": tokenizer.mask if tokenizer is not None else None,
        "longest": subject.longest,
        "ends": list(subject.ends),
        "laws": list(LAWS),
        "examples": examples(opened.item),
    }


def examples(item: Item) -> list[str]:
    """Inputs that a run was watched on, to try it with."""
    run = {"run": item.path, "checkpoint": item.path and item.path.parent.parent}.get(item.kind)
    lines = read_lines(run / "samples.jsonl")[-40:] if run else []
    inputs = [next((v for k, v in line.items() if k != "step" and isinstance(v, str)), "") for line in lines]
    return [text for text in dict.fromkeys(inputs) if 0 < len(text) <= 60][:3]


def _layers(model: Any) -> list[int]:
    return [len(stack.order) for stack in (model.encoder, model.decoder) if stack is not None]


def _first(stack: Any) -> Any:
    return stack.spec.layers[0].branches[0]


def anatomy(opened: Opened) -> dict[str, Any]:
    """The counted tree, and for each stack what one block is made of."""
    model = opened.subject.model
    stacks = {side: _stack(getattr(model, side)) for side in ("encoder", "decoder") if getattr(model, side) is not None}
    spec = model.spec
    return {
        "about": about(opened),
        "count": count(model.spec, length=_usual(opened)).plain(),
        "stacks": stacks,
        "bridge": type(spec.bridge).__name__,
        "tied": [list(pair) for pair in spec.tied],
        "code": repr(spec)[:20_000],
    }


def _usual(opened: Opened) -> int | None:
    longest = opened.subject.longest
    return None if longest is None else min(longest, 512)


def _stack(stack: Any) -> dict[str, Any]:
    spec = stack.spec
    block = spec.layers[0]
    embed = {"position": _word(getattr(spec.embed, "position", None)), "scale": getattr(spec.embed, "scale", 1.0)}
    return {
        "layers": len(stack.order),
        "shared": len(stack.layers) < len(stack.order),
        "d_model": spec.d_model,
        "embed": embed,
        "block": type(block).__name__,
        "branches": [_branch(branch) for branch in block.branches],
        "final_norm": _word(spec.final_norm),
    }


def _branch(branch: Any) -> dict[str, Any]:
    layer = branch.layer
    names = ("heads", "kv_heads", "head_dim", "d_ff", "activation")
    facts = {name: value for name in names if (value := getattr(layer, name, None)) is not None}
    parts = {name: _word(getattr(layer, name, None)) for name in ("sees", "position") if hasattr(layer, name)}
    norms = {slot: _word(getattr(branch, slot)) for slot in ("norm", "out_norm", "post_norm")}
    return {"role": branch.role, "layer": type(layer).__name__, **facts, **parts, "norms": norms}


def _word(part: Any) -> str:
    """A part by its name, empty for one that does nothing."""
    return "" if part is None or part == NoNorm() or type(part).__name__.startswith("No") else repr(part)


def tokens(opened: Opened, ask: OfText) -> dict[str, Any]:
    """How a text is cut: ids, pieces, bytes; each side as the model reads it."""
    reading = reading_of(opened, ask)
    tokenizer = opened.subject.tokenizer
    return {
        "tokens": _spelled(reading.tokens, tokenizer),
        "source": _spelled(reading.source, tokenizer),
        "generated": reading.generated,
        "specials": {role: tokenizer.special(role) for role in tokenizer.specials} if tokenizer is not None else {},
    }


def _spelled(tokens: Any, tokenizer: Any) -> list[dict[str, Any]]:
    told = labels(tokens)
    if tokenizer is not None:
        for one in told:
            raw = Tokenizer.piece_bytes(tokenizer, one["id"]) if one["id"] < len(tokenizer) else b""
            one["bytes"] = raw.hex(" ")[:200]
    return told
