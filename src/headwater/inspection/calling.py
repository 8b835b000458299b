"""How to call a model that somebody else wrote: ids [B, L] in, logits out, and what else it can take.

The whole adapter is two functions. Ours are known; for any other module they are guessed from the names its forward
takes, and the guess is told in the report.

    call(ids, keep=, source=, source_keep=, documents=) -> logits [B, L, V]       of the extras, only those it names
    step(ids, state, keep=, source=, source_keep=) -> (logits, state)             the first state is None

keep is bool [B, L], True where a token is real. documents is int [B, L], the number of each token's document.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwater.core.cache import growing
from headwater.core.masks import Everyone, Reach
from headwater.core.model import Transformer
from headwater.errors import BadInput, BadSetting
from headwater.inspection.words import Both

EXTRAS = ("keep", "source", "source_keep", "documents")


@dataclass(frozen=True)
class Calling:
    """reach: by module path, how far back and ahead a place may depend there; the longest path that fits decides."""

    call: Callable[..., Any]
    takes: frozenset[str]
    step: Callable[..., Any] | None
    step_takes: frozenset[str]
    vocab: int
    source_vocab: int
    causal: bool
    told: str
    reach: tuple[tuple[str, Reach], ...] = ()

    def __call__(self, ids: Tensor, **extras: Tensor | None) -> Tensor:
        return logits_of(self.call(ids, **{name: value for name, value in extras.items() if value is not None}))


def calling(
    model: nn.Module,
    call: Callable[..., Any] | None = None,
    step: Callable[..., Any] | None = None,
    vocab: int | None = None,
    causal: bool | None = None,
    reach: Reach | None = None,
) -> Calling:
    """What the user says, else what is known of our models, else what the names in the signature tell."""
    if isinstance(model, Transformer):
        found = _ours(model)
    else:
        found = _guessed(model, call)
    call, step = call or found["call"], step or found.get("step")
    told = found["told"] if call is found["call"] else Both("the call you gave", "你给的调用")
    vocab = vocab or found.get("vocab") or _vocab(model)
    return Calling(
        call=call,
        takes=_extras(call),
        step=step,
        step_takes=_extras(step) if step else frozenset(),
        vocab=vocab,
        source_vocab=found.get("source_vocab") or vocab,
        causal=found["causal"] if causal is None else causal,
        told=told,
        reach=(("", reach),) if reach else found.get("reach", ()),
    )


def _extras(function: Callable[..., Any]) -> frozenset[str]:
    given = getattr(function, "takes", None)
    return frozenset(given if given is not None else set(inspect.signature(function).parameters) & set(EXTRAS))


def logits_of(answer: Any) -> Tensor:
    """The tensor that counts, out of whatever a forward pass returns."""
    if isinstance(answer, Tensor):
        return answer
    for name in ("logits", "last_hidden_state"):
        value = answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(answer, tuple | list):
        first = next((value for value in answer if isinstance(value, Tensor)), None)
        if first is not None:
            return first
    raise BadInput(f"the model must give a tensor or something with .logits, got {type(answer).__name__}; pass call=")


def _vocab(model: nn.Module) -> int:
    known = getattr(getattr(model, "config", None), "vocab_size", None)
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    vocab = known if isinstance(known, int) else next(tables, None)
    if vocab is None:
        raise BadSetting(
            "vocab must be given: the model has no embedding table to read it from; check(model, vocab=...)"
        )
    return vocab


# --------------------------------------------------------------------------------------------------------------- ours


def _ours(model: Transformer) -> dict[str, Any]:
    both = model.encoder is not None and model.decoder is not None

    def call(ids: Tensor, **extras: Tensor) -> Tensor:
        return model(ids, **extras)

    def step(ids: Tensor, state: Any, keep: Tensor | None = None, **source: Tensor) -> tuple[Tensor, Any]:
        if state is None:
            memory = model.encode(source["source"], keep=source.get("source_keep")) if both else None
            state = growing(model), memory
        return model.decode(ids, memory=state[1], keep=keep, cache=state[0]), state

    beside = {"source", "source_keep"} if both else set()
    call.takes = {"keep"} | (beside or {"documents"})  # type: ignore[attr-defined]
    step.takes = {"keep"} | beside  # type: ignore[attr-defined]
    reach = _reach(model)
    causal = all(ahead == 0 for _, (_, ahead) in reach)
    found: dict[str, Any] = {
        "call": call,
        "causal": causal,
        "reach": reach,
        "told": Both("a model of ours", "本库的模型"),
    }
    if causal and model.decoder is not None:
        found["step"] = step
    found["vocab"] = getattr(model.writer.spec.embed, "vocab", None)
    found["source_vocab"] = getattr(model.spec.encoder and model.spec.encoder.embed, "vocab", None) if both else None
    return found


def _reach(model: Transformer) -> tuple[tuple[str, Reach], ...]:
    """Layer by layer, how far a place may depend on others: the reaches of all mixing before it add up."""
    side, spec = "decoder" if model.decoder is not None else "encoder", model.writer.spec
    total: Reach = (0, 0)
    found: dict[str, Reach] = {}
    for index in model.writer.order:
        for branch in spec.layers[index].branches:
            if branch.role not in ("ffn", "cross_attn"):  # a feed-forward mixes no places, a memory is no place
                (back, ahead), (b, a) = total, getattr(branch.layer, "sees", Everyone()).reach
                total = (
                    None if back is None or b is None else back + b,
                    None if ahead is None or a is None else ahead + a,
                )
        found[f"{side}.layers.{index}"] = total
    return (*found.items(), ("", total))


# ------------------------------------------------------------------------------------------------------- anybody else's

KEEP = {  # the name of a padding mask -> how a bool mask (True = real) is written there, in the order they are tried
    "keep": (torch.Tensor.bool,),
    "attention_mask": (torch.Tensor.long, torch.Tensor.bool),
    "mask": (torch.Tensor.bool, torch.Tensor.long),
    "key_padding_mask": (torch.logical_not,),
    "src_key_padding_mask": (torch.logical_not,),
    "padding_mask": (torch.logical_not,),
}
TARGET_KEEP = ("tgt_key_padding_mask", "decoder_attention_mask", "tgt_keep", "target_keep")
SOURCE_KEEP = ("src_key_padding_mask", "attention_mask", "src_keep", "source_keep")
PAIRS = (("src", "tgt"), ("source", "target"), ("input_ids", "decoder_input_ids"), ("source_ids", "target_ids"))
INVERTED = ("tgt_key_padding_mask", "src_key_padding_mask")


def _guessed(model: nn.Module, given: Callable[..., Any] | None) -> dict[str, Any]:
    names = list(inspect.signature(model.forward).parameters)
    pair = next((pair for pair in PAIRS if set(pair) <= set(names) and _two_stacks(model, pair)), None)
    if given is not None:
        found: dict[str, Any] = {"call": given, "told": ""}
    else:
        found = _paired(model, names, *pair) if pair else _single(model, names)
    kind = type(model).__name__
    found["causal"] = not any(word in kind for word in ("MaskedLM", "ForPreTraining", "Classification", "Bert"))
    if "past_key_values" in names and found["causal"] and given is None:
        found["step"] = _cached(model, names, pair)
    return found


def _two_stacks(model: nn.Module, pair: tuple[str, str]) -> bool:
    return pair[0] != "input_ids" or bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _single(model: nn.Module, names: list[str]) -> dict[str, Any]:
    """forward(ids, a mask?): the first mask of a known name through which the model runs is the one."""
    masks = [(name, how) for name in KEEP if name in names for how in KEEP[name]]
    always = {"use_cache": False} if "use_cache" in names else {}

    def call(ids: Tensor, keep: Tensor | None = None, mask: Any = masks[0] if masks else None) -> Any:
        extras: dict[str, Any] = dict(always)
        if keep is not None:
            name, how = mask
            extras[name] = how(keep)
            if "position_ids" in names:
                extras["position_ids"] = places(keep)
        answer = model(ids, **extras)
        if "targets" in names and logits_of(answer).shape[1:2] != ids.shape[1:2]:
            answer = model(ids, **extras, targets=ids)  # some models answer for the last token alone unless they train
        return answer

    works = next((mask for mask in masks if _runs(model, partial(call, mask=mask))), None)
    chosen = partial(call, mask=works)
    chosen.takes = {"keep"} if works else set()  # type: ignore[attr-defined]
    hidden = " (True = padding)" if works and works[1] is torch.logical_not else ""
    return {"call": chosen, "told": f"model(ids{f', {works[0]}=…{hidden}' if works else ''})"}


def _paired(model: nn.Module, names: list[str], source_name: str, ids_name: str) -> dict[str, Any]:
    own = next((name for name in TARGET_KEEP if name in names), None)
    other = next((name for name in SOURCE_KEEP if name in names), None)

    def call(ids: Tensor, source: Tensor, keep: Tensor | None = None, source_keep: Tensor | None = None) -> Any:
        extras: dict[str, Any] = {source_name: source, ids_name: ids}
        for name, mask in ((own, keep), (other, source_keep)):
            if name and mask is not None:
                extras[name] = ~mask if name in INVERTED else mask.long()
        return model(**extras)

    takes = {"source"} | ({"keep"} if own else set()) | ({"source_keep"} if other else set())
    call.takes = takes  # type: ignore[attr-defined]
    masks = "".join(f", {name}=…" for name in (own, other) if name)
    return {"call": call, "told": f"model({source_name}=source, {ids_name}=ids{masks})"}


def _cached(model: nn.Module, names: list[str], pair: tuple[str, str] | None) -> Callable[..., Any]:
    """past_key_values in, past_key_values out; the padding mask and the places cover what came before, too."""

    def step(ids: Tensor, state: Any, keep: Tensor | None = None, source: Tensor | None = None) -> tuple[Tensor, Any]:
        past, before = state or (None, None)
        keep = torch.ones_like(ids, dtype=torch.bool) if keep is None else keep
        whole = keep if before is None else torch.cat((before, keep), 1)
        extras: dict[str, Any] = {"past_key_values": past, "use_cache": True}
        if pair:
            answer = model(**{pair[0]: source, pair[1]: ids}, **extras)
        else:
            extras |= {"attention_mask": whole.long()} if "attention_mask" in names else {}
            extras |= {"position_ids": places(whole)[:, -ids.shape[1] :]} if "position_ids" in names else {}
            answer = model(ids, **extras)
        return logits_of(answer), (answer.past_key_values, whole)

    step.takes = {"source"} if pair else {"keep"}  # type: ignore[attr-defined]
    return step


def places(keep: Tensor) -> Tensor:
    """[B, L] the place of each real token, counted over real tokens."""
    return (keep.long().cumsum(1) - 1).clamp(min=0)


def _runs(model: nn.Module, call: Callable[..., Any]) -> bool:
    """Whether a call goes through with a mask that hides something."""
    at = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids, keep = torch.ones(2, 5, dtype=torch.long, device=at), torch.ones(2, 5, dtype=torch.bool, device=at)
    keep[1, 3:] = False
    try:
        with torch.no_grad():
            logits_of(call(ids, keep))
    except Exception:  # a stranger's forward pass may raise anything at all
        return False
    return True
