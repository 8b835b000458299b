"""Handlers for model facts, the module structure with parameter counts, and the tokenization of a text."""

from __future__ import annotations

from typing import Any

from headwater.checker.api import laws_of
from headwater.core.model import Transformer
from headwater.core.norms import NoNorm
from headwater.core.stack import TransformerStack
from headwater.inspection.costs import count, meta_model, num_parameters
from headwater.inspection.logit_lens import has_lm_head
from headwater.serving.handlers.attention import token_dicts
from headwater.serving.handlers.speech import reads_sound
from headwater.serving.model_store import OpenModel, StoredModel
from headwater.serving.schemas import TextRequest, tokenize_request
from headwater.text.tokenizer import Tokenizer
from headwater.training.loggers import read_jsonl
from headwater.variants.patches import Patches
from headwater.variants.towers import TwoTowers


def model_info(open_model: OpenModel) -> dict[str, Any]:
    """Facts about a model: architecture, sizes, tokenizer, head and task."""
    inspected = open_model.inspected
    model = inspected.model
    tower = model.image if isinstance(model, TwoTowers) else model
    embed: Any = tower.output_stack.spec.embed
    tokenizer = inspected.tokenizer
    config = getattr(open_model.loaded, "config", {})
    return {
        "name": open_model.stored.name,
        "kind": open_model.stored.kind,
        "architecture": open_model.architecture,
        "family": str(config.get("model_type") or "headwater"),
        "parameters": num_parameters(meta_model(model.spec)),  # a quantized model stores its weights as blocks
        "input": _input_kind(tower),
        "d_model": tower.output_stack.spec.d_model,
        "layers": _num_layers(tower),
        "vocab_size": getattr(embed, "vocab", 0),
        "heads": _first_branch(tower.output_stack).layer.heads,
        "head_type": type(tower.spec.head).__name__,
        "has_lm_head": has_lm_head(tower),
        "task": inspected.metadata.get("task", ""),
        "labels": list(inspected.labels)[:50],
        "tokenizer_size": len(tokenizer) if tokenizer is not None else 0,
        "has_chat_template": bool(tokenizer is not None and tokenizer.chat_template),
        "mask_token_id": tokenizer.mask_id if tokenizer is not None else None,
        "max_positions": inspected.max_positions,
        "eos_token_ids": list(inspected.eos_ids),
        "laws": list(laws_of(tower)),
        "examples": sample_inputs(open_model.stored),
    }


def _input_kind(model: Transformer) -> str:
    """What a model reads: text, image or sound."""
    if reads_sound(model):
        return "sound"
    return "image" if isinstance(model.output_stack.spec.embed, Patches) else "text"


def sample_inputs(stored: StoredModel) -> list[str]:
    """Example inputs of a model: up to three short ones from the samples.jsonl of its run."""
    run_dir = stored.path
    if run_dir is None or stored.kind not in ("run", "checkpoint", "base"):
        return []
    inputs: list[str] = []
    for line in read_jsonl(run_dir / "samples.jsonl")[-40:]:
        texts = [value for key, value in line.items() if key != "step" and isinstance(value, str)]
        inputs.append(texts[0] if texts else "")
    return [text for text in dict.fromkeys(inputs) if 0 < len(text) <= 60][:3]


def _num_layers(model: Transformer) -> list[int]:
    return [len(stack.order) for stack in (model.encoder, model.decoder) if stack is not None]


def _first_branch(stack: TransformerStack) -> Any:
    block: Any = stack.spec.layers[0]
    return block.branches[0]


def model_structure(open_model: OpenModel) -> dict[str, Any]:
    """The module tree with parameter counts, costs, and the structure of one block of each stack."""
    model = open_model.inspected.model
    spec = model.spec
    sides = [side for side in ("encoder", "decoder") if getattr(model, side) is not None]
    return {
        "model_info": model_info(open_model),
        "costs": count(spec, length=_default_length(open_model)).to_dict(),
        "stacks": {side: _stack_dict(getattr(model, side)) for side in sides},
        "bridge": type(spec.bridge).__name__,
        "tied": [list(pair) for pair in spec.tied],
        "code": repr(spec)[:20_000],
    }


def _default_length(open_model: OpenModel) -> int | None:
    """The sequence length at which costs are counted."""
    max_positions = open_model.inspected.max_positions
    return None if max_positions is None else min(max_positions, 512)


def _stack_dict(stack: Any) -> dict[str, Any]:
    spec = stack.spec
    block = spec.layers[0]
    embed = {"position": _part_repr(getattr(spec.embed, "position", None)), "scale": getattr(spec.embed, "scale", 1.0)}
    return {
        "layers": len(stack.order),
        "shared_weights": len(stack.layers) < len(stack.order),
        "d_model": spec.d_model,
        "embed": embed,
        "block": type(block).__name__,
        "branches": [_branch_dict(branch) for branch in block.branches],
        "final_norm": _part_repr(spec.final_norm),
    }


def _branch_dict(branch: Any) -> dict[str, Any]:
    layer = branch.layer
    fields = {name: getattr(layer, name, None) for name in ("heads", "kv_heads", "head_dim", "d_ff", "activation")}
    sizes = {name: value for name, value in fields.items() if value is not None}
    parts = {name: _part_repr(getattr(layer, name)) for name in ("mask", "position") if hasattr(layer, name)}
    norms = {slot: _part_repr(getattr(branch, slot)) for slot in ("norm", "out_norm", "post_norm")}
    return {"role": branch.role, "layer": type(layer).__name__, **sizes, **parts, "norms": norms}


def _part_repr(part: Any) -> str:
    """A part as Python code; empty for one that does nothing (NoNorm, NoPosition)."""
    if part is None or part == NoNorm() or type(part).__name__.startswith("No"):
        return ""
    return repr(part)


def tokenize(open_model: OpenModel, request: TextRequest) -> dict[str, Any]:
    """Tokens of a text with their ids and bytes, for each side of the model."""
    inputs = tokenize_request(open_model, request)
    tokenizer = open_model.inspected.tokenizer
    roles = tokenizer.special_tokens_map if tokenizer is not None else ()
    return {
        "tokens": _token_dicts_with_bytes(inputs.tokens, tokenizer),
        "source": _token_dicts_with_bytes(inputs.source, tokenizer),
        "generated": inputs.generated,
        "special_tokens": {role: tokenizer.special_id(role) for role in roles},
    }


def _token_dicts_with_bytes(tokens: Any, tokenizer: Any) -> list[dict[str, Any]]:
    dicts = token_dicts(tokens)
    if tokenizer is not None:
        for token in dicts:
            raw = Tokenizer.piece_bytes(tokenizer, token["id"]) if token["id"] < len(tokenizer) else b""
            token["bytes"] = raw.hex(" ")[:200]
    return dicts
