"""Adapters that call any nn.Module: token ids [B, L] in, logits out, with the masks and cache its forward accepts.

An adapter has two functions. Those of headwater models are known; for any other module they are guessed from the
parameter names of its forward, and the guess is stated in the report.

    call(ids, attention_mask=, source=, source_attention_mask=, document_ids=) -> logits [B, L, V]
    step(ids, state, attention_mask=, source=, source_attention_mask=) -> (logits, state)       the first state is None

Only the keyword arguments that a function names are passed. attention_mask is bool [B, L], True for real tokens.
document_ids is int [B, L], the number of the document of each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwater.checker.patch_call import NUM_PATCHES, PatchCall
from headwater.core.cache import dynamic_cache
from headwater.core.masks import WindowSize
from headwater.core.model import Transformer
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _
from headwater.inspection.hooks import extract_logits
from headwater.variants.patches import PatchesLayer
from headwater.variants.towers import TwoTowers

OPTIONAL_INPUTS = ("attention_mask", "source", "source_attention_mask", "document_ids")

INPUT_FEATURES = {"attention_mask": "padding", "document_ids": "packing"}  # of a headwater model: core.base.FEATURES


@dataclass(frozen=True)
class ModelAdapter:
    """How to call a model. receptive_fields: by module path, how far back and ahead the inputs of a position reach.

    padding_sides: where its rows may be padded. length: of every row, where the model decides it.
    """

    call: Callable[..., Any]
    accepts: frozenset[str]
    step: Callable[..., Any] | None
    step_accepts: frozenset[str]
    vocab: int
    source_vocab: int
    causal: bool
    description: str
    receptive_fields: tuple[tuple[str, WindowSize], ...] = ()
    padding_sides: tuple[str, ...] = ("left", "right")
    length: int | None = None

    def __call__(self, ids: Tensor, **model_kwargs: Tensor | None) -> Tensor:
        present = {name: value for name, value in model_kwargs.items() if value is not None}
        return extract_logits(self.call(ids, **present))


def adapt(
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    vocab: int | None = None,
    causal: bool | None = None,
    receptive_field: WindowSize | None = None,
    length: int = 5,
) -> ModelAdapter:
    """The adapter of a model: the functions of the caller, else those of a headwater model, else guessed ones.

    length: of the rows with which a guess is tried; a model may treat short rows otherwise, and all rows after them.
    """
    defaults = _headwater_adapter(model) if isinstance(model, Transformer) else _guessed_adapter(model, call, length)
    call = call or defaults["call"]
    step = step or defaults.get("step")
    description = defaults["description"] if call is defaults["call"] else _("the call= you passed")
    vocab = vocab or defaults.get("vocab") or _find_vocab_size(model)
    return ModelAdapter(
        call=call,
        accepts=_accepted_inputs(call),
        step=step,
        step_accepts=_accepted_inputs(step) if step else frozenset(),
        vocab=vocab,
        source_vocab=defaults.get("source_vocab") or vocab,
        causal=defaults["causal"] if causal is None else causal,
        description=description,
        padding_sides=defaults.get("padding_sides", ("left", "right")),
        length=defaults.get("length"),
        receptive_fields=(("", receptive_field),) if receptive_field else defaults.get("receptive_fields", ()),
    )


def _accepted_inputs(function: Callable[..., Any]) -> frozenset[str]:
    accepts = getattr(function, "accepts", None)
    if accepts is None:
        accepts = set(inspect.signature(function).parameters) & set(OPTIONAL_INPUTS)
    return frozenset(accepts)


def _find_vocab_size(model: nn.Module) -> int:
    """The vocabulary size: that of the model's config, else of its first embedding table."""
    config_vocab = getattr(getattr(model, "config", None), "vocab_size", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    vocab = config_vocab if isinstance(config_vocab, int) else next(tables, None)
    if vocab is None:
        raise BadSetting(
            _("vocab must be given: the model has no embedding table to read it from; check(model, vocab=...)")
        )
    return vocab


# ---------------------------------------------------------------------------------------------------- headwater models


def _headwater_adapter(model: Transformer) -> dict[str, Any]:
    """The adapter fields of a headwater model."""
    if isinstance(model, TwoTowers):
        raise BadInput(_("check: two towers are two models; check model.text and model.image"))
    if model.encoder is not None and isinstance(model.encoder.embed, PatchesLayer):
        return _image_adapter(model, model.encoder.embed)
    is_encoder_decoder = model.encoder is not None and model.decoder is not None

    def call(ids: Tensor, **kwargs: Tensor) -> Tensor:
        return model(ids, **kwargs)

    def step(ids: Tensor, state: Any, attention_mask: Tensor | None = None, **source: Tensor) -> tuple[Tensor, Any]:
        if state is None:
            memory = None
            if is_encoder_decoder:
                memory = model.encode(source["source"], attention_mask=source.get("source_attention_mask"))
            state = dynamic_cache(model), memory
        cache, memory = state
        return model.decode(ids, memory=memory, attention_mask=attention_mask, cache=cache), state

    source_inputs = {"source", "source_attention_mask"} if is_encoder_decoder else set()
    stacks = [stack for stack in (model.encoder, model.decoder) if stack is not None]
    refused = {feature for stack in stacks for feature in stack.unsupported}
    inputs = {name for name, feature in INPUT_FEATURES.items() if feature not in refused}
    call.accepts = (inputs - {"document_ids"}) | source_inputs if source_inputs else inputs  # type: ignore[attr-defined]
    step.accepts = (inputs - {"document_ids"}) | source_inputs  # type: ignore[attr-defined]
    receptive_fields = _receptive_fields(model)
    causal = all(ahead == 0 for _, (_, ahead) in receptive_fields)
    defaults: dict[str, Any] = {
        "call": call,
        "causal": causal,
        "receptive_fields": receptive_fields,
        "description": _("a headwater model"),
    }
    if "left_padding" in refused:
        defaults["padding_sides"] = ("right",)
    if causal and model.decoder is not None and "cache" not in refused:
        defaults["step"] = step
    defaults["vocab"] = getattr(model.output_stack.spec.embed, "vocab", None)
    defaults["source_vocab"] = (
        getattr(model.spec.encoder and model.spec.encoder.embed, "vocab", None) if is_encoder_decoder else None
    )
    return defaults


def _image_adapter(model: Transformer, embed: PatchesLayer) -> dict[str, Any]:
    """The adapter fields of an image model."""
    call = PatchCall(model, embed)
    return {
        "call": call,
        "causal": False,
        "vocab": NUM_PATCHES,
        "length": call.length,
        "description": _("a headwater model of images, where a token is a patch of random pixels"),
    }


def _receptive_fields(model: Transformer) -> tuple[tuple[str, WindowSize], ...]:
    """The receptive field after each layer: the sum of the windows of all attention layers up to it."""
    side = "decoder" if model.decoder is not None else "encoder"
    spec = model.output_stack.spec
    total: WindowSize = (0, 0)
    fields_by_path: dict[str, WindowSize] = {}
    for index in model.output_stack.order:
        for branch in getattr(spec.layers[index], "branches", ()):
            if branch.role not in ("ffn", "cross_attn"):
                back, ahead = getattr(branch.layer, "receptive_field", (None, None))
                total = (_add_or_none(total[0], back), _add_or_none(total[1], ahead))
        fields_by_path[f"{side}.layers.{index}"] = total
    return (*fields_by_path.items(), ("", total))


def _add_or_none(a: int | None, b: int | None) -> int | None:
    """The sum of two distances; None (no limit) if either is None."""
    return None if a is None or b is None else a + b


# -------------------------------------------------------------------------------------------------------- other models

# name of a padding mask -> conversions of a bool mask (True = real), in the order they are tried
MASK_CONVERSIONS = {
    "keep": (torch.Tensor.bool,),
    "attention_mask": (torch.Tensor.long, torch.Tensor.bool),
    "mask": (torch.Tensor.bool, torch.Tensor.long),
    "key_padding_mask": (torch.logical_not,),
    "src_key_padding_mask": (torch.logical_not,),
    "padding_mask": (torch.logical_not,),
}
TARGET_MASK_NAMES = ("tgt_key_padding_mask", "decoder_attention_mask", "tgt_keep", "target_keep")
SOURCE_MASK_NAMES = ("src_key_padding_mask", "attention_mask", "src_keep", "source_keep", "source_attention_mask")
SOURCE_TARGET_NAMES = (
    ("src", "tgt"),
    ("source", "target"),
    ("input_ids", "decoder_input_ids"),
    ("source_ids", "target_ids"),
)
TRUE_MEANS_PADDING = ("tgt_key_padding_mask", "src_key_padding_mask")


def _guessed_adapter(model: nn.Module, user_call: Callable[..., Any] | None, length: int) -> dict[str, Any]:
    """The adapter fields of any module, guessed from the parameter names of its forward."""
    names = list(inspect.signature(model.forward).parameters)
    pair = next(
        (pair for pair in SOURCE_TARGET_NAMES if set(pair) <= set(names) and _is_encoder_decoder(model, pair)), None
    )
    if user_call is not None:
        defaults: dict[str, Any] = {"call": user_call, "description": ""}
    else:
        defaults = _source_target_call(model, names, *pair) if pair else _single_input_call(model, names, length)
    kind = type(model).__name__
    defaults["causal"] = not any(word in kind for word in ("MaskedLM", "ForPreTraining", "Classification", "Bert"))
    if "past_key_values" in names and defaults["causal"] and user_call is None:
        defaults["step"] = _cached_step(model, names, pair)
    return defaults


def _is_encoder_decoder(model: nn.Module, pair: tuple[str, str]) -> bool:
    return pair[0] != "input_ids" or bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _single_input_call(model: nn.Module, names: list[str], length: int) -> dict[str, Any]:
    """forward(ids, mask?): the first mask of a known name with which the model runs is used."""
    masks = [(name, convert) for name in MASK_CONVERSIONS if name in names for convert in MASK_CONVERSIONS[name]]
    constant_kwargs = {"use_cache": False} if "use_cache" in names else {}

    def call(ids: Tensor, attention_mask: Tensor | None = None, mask: Any = masks[0] if masks else None) -> Any:
        kwargs: dict[str, Any] = dict(constant_kwargs)
        if attention_mask is not None:
            name, convert = mask
            kwargs[name] = convert(attention_mask)
            if "position_ids" in names:
                kwargs["position_ids"] = position_ids(attention_mask)
        output = model(ids, **kwargs)
        if "targets" in names and extract_logits(output).shape[1:2] != ids.shape[1:2]:
            output = model(ids, **kwargs, targets=ids)  # nanoGPT returns only the last logits without targets
        return output

    accepted_mask = next((mask for mask in masks if _accepts_mask(model, partial(call, mask=mask), length)), None)
    call_with_mask = partial(call, mask=accepted_mask)
    call_with_mask.accepts = {"attention_mask"} if accepted_mask else set()  # type: ignore[attr-defined]
    mask_text = ""
    if accepted_mask:
        name, convert = accepted_mask
        mask_text = f", {name}=… (True = padding)" if convert is torch.logical_not else f", {name}=…"
    return {"call": call_with_mask, "description": f"model(ids{mask_text})"}


def _source_target_call(model: nn.Module, names: list[str], source_name: str, ids_name: str) -> dict[str, Any]:
    """forward(source, target, masks?) of an encoder-decoder, with its masks of known names."""
    target_mask_name = next((name for name in TARGET_MASK_NAMES if name in names), None)
    source_mask_name = next((name for name in SOURCE_MASK_NAMES if name in names), None)

    def call(
        ids: Tensor, source: Tensor, attention_mask: Tensor | None = None, source_attention_mask: Tensor | None = None
    ) -> Any:
        kwargs: dict[str, Any] = {source_name: source, ids_name: ids}
        for name, mask in ((target_mask_name, attention_mask), (source_mask_name, source_attention_mask)):
            if name and mask is not None:
                kwargs[name] = ~mask if name in TRUE_MEANS_PADDING else mask.long()
        return model(**kwargs)

    accepted = {"source"}
    if target_mask_name:
        accepted.add("attention_mask")
    if source_mask_name:
        accepted.add("source_attention_mask")
    call.accepts = accepted  # type: ignore[attr-defined]
    masks = "".join(f", {name}=…" for name in (target_mask_name, source_mask_name) if name)
    return {"call": call, "description": f"model({source_name}=source, {ids_name}=ids{masks})"}


def _cached_step(model: nn.Module, names: list[str], pair: tuple[str, str] | None) -> Callable[..., Any]:
    """A step with past_key_values; the padding mask and the positions include the cached tokens."""

    def step(
        ids: Tensor, state: Any, attention_mask: Tensor | None = None, source: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        past_key_values, past_mask = state or (None, None)
        if attention_mask is None:
            attention_mask = torch.ones_like(ids, dtype=torch.bool)
        if past_mask is not None:
            attention_mask = torch.cat((past_mask, attention_mask), 1)  # [B, cached + new]

        kwargs: dict[str, Any] = {"past_key_values": past_key_values, "use_cache": True}
        if pair:
            output = model(**{pair[0]: source, pair[1]: ids}, **kwargs)
        else:
            if "attention_mask" in names:
                kwargs["attention_mask"] = attention_mask.long()
            if "position_ids" in names:
                kwargs["position_ids"] = position_ids(attention_mask)[:, -ids.shape[1] :]
            output = model(ids, **kwargs)
        return extract_logits(output), (output.past_key_values, attention_mask)

    step.accepts = {"source"} if pair else {"attention_mask"}  # type: ignore[attr-defined]
    return step


def position_ids(attention_mask: Tensor) -> Tensor:
    """The position of each token [B, L], counted over real tokens."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def _accepts_mask(model: nn.Module, call: Callable[..., Any], length: int) -> bool:
    """Whether the model runs with a mask that hides something."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.ones(2, length, dtype=torch.long, device=device)
    attention_mask = torch.ones(2, length, dtype=torch.bool, device=device)
    attention_mask[1, -2:] = False
    try:
        with torch.no_grad():
            extract_logits(call(ids, attention_mask))
    except Exception:  # a foreign forward pass may raise any exception
        return False
    return True
