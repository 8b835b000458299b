"""Handlers for next-token probabilities after each logits processor, mask filling, and the logit lens.

Sampling is that of headwater.generation, so that the page, Python and the command line give identical numbers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from headwater.core.modules import eval_mode
from headwater.errors import BadInput, Fault
from headwater.generation.api import TextModel
from headwater.generation.request import Request, SequenceState, TokenEvent
from headwater.generation.sampling import LogitsProcessor, ProcessorTrace, SampledToken, sample
from headwater.generation.sampling_params import build_processors
from headwater.i18n import _
from headwater.inspection.inputs import Token, TokenizedInput
from headwater.inspection.logit_lens import head_vocab_size, lens, lm_head, logprobs_in_chunks
from headwater.inspection.results import to_jsonable
from headwater.serving.handlers.attention import token_dicts
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import FillMaskRequest, LogitLensRequest, SamplingRequest, TextRequest, tokenize_request

MAX_CACHED_LOGITS = 8
LENS_TOP_K = 5


class LogitsCache:
    """LRU cache of compute_logits: moving a sampling slider requests the same text again."""

    def __init__(self) -> None:
        self.entries: OrderedDict[Any, tuple[Tensor, list[float | None]]] = OrderedDict()

    def get(self, open_model: OpenModel, inputs: TokenizedInput) -> tuple[Tensor, list[float | None]]:
        """compute_logits(inputs), computed once."""
        key = (open_model.cache_key, tuple(t.id for t in inputs.tokens), tuple(t.id for t in inputs.source))
        if key not in self.entries:
            self.entries[key] = compute_logits(inputs)
            while len(self.entries) > MAX_CACHED_LOGITS:
                self.entries.popitem(last=False)
        self.entries.move_to_end(key)
        return self.entries[key]


def compute_logits(inputs: TokenizedInput) -> tuple[Tensor, list[float | None]]:
    """Logits [V] after the last token, and the probability of each token given those before; None for the first."""
    head = lm_head(inputs.model)
    token_probs: list[float | None] = [None]
    with eval_mode(inputs.model), torch.inference_mode():
        states, model_inputs = inputs.hidden_states()  # [1, Q, D]
        logits = head(states[:, -1:], model_inputs)[0, 0].float()  # [V]
        targets = inputs.ids[0, 1:]
        for first, logprobs in logprobs_in_chunks(head, states[:, :-1], model_inputs, head_vocab_size(head)):
            target_logprobs = logprobs.gather(1, targets[first : first + len(logprobs), None])[:, 0]
            token_probs += target_logprobs.exp().tolist()
    return logits, token_probs


# ------------------------------------------------------------------------------------------------------ next token


def next_token(open_model: OpenModel, request: SamplingRequest, logits_cache: LogitsCache) -> dict[str, Any]:
    """The next-token distribution before and after each logits processor, and the sampled token."""
    if open_model.architecture == "encoder":
        raise BadInput(_("an encoder has no next token; mask a token instead"))
    inputs = tokenize_prefix(open_model, request)
    logits, token_probs = logits_cache.get(open_model, inputs)
    sequence = build_sequence(open_model, inputs, request, len(logits))
    sampled = sample_token(sequence, logits)
    return {
        "tokens": token_dicts(inputs.tokens),
        "source": token_dicts(inputs.source),
        "token_probs": to_jsonable(token_probs),
        "token_id": sampled.token,
        "is_eos": sampled.token in open_model.inspected.eos_ids,
        "processors": [{"name": "model", "value": None}, *map(describe_processor, sequence.request.processors)],
        "num_allowed": count_allowed_tokens(sequence, logits),
        "candidates": top_candidates(inputs, sampled.trace, sampled.token, request.num_candidates),
    }


def tokenize_prefix(open_model: OpenModel, request: TextRequest) -> TokenizedInput:
    """The tokens before the next one. The decoder of an encoder-decoder starts with its start token."""
    inspected = open_model.inspected
    if open_model.architecture == "encoder-decoder" and request.ids is None:
        if inspected.decoder_start_id is None:
            raise BadInput(_("this model has no decoder start token; give ids"))
        ids = [inspected.decoder_start_id]
        if request.text:
            target_ids = inspected.encode_target(request.text)
            ids += target_ids[:-1] if target_ids[-1] in inspected.eos_ids else target_ids
        request = request.model_copy(update={"ids": ids})
    return tokenize_request(open_model, request)


def build_sequence(
    open_model: OpenModel, inputs: TokenizedInput, request: SamplingRequest, vocab_size: int
) -> SequenceState:
    """The sequence state that generate() would have: the step is the number of generated tokens, so a seed agrees."""
    text_model = TextModel.wrap(open_model.inspected.text_model)
    processors = (*text_model.processors, *build_processors(**request.sampling_options()))
    for processor in processors:
        processor.check_vocab(vocab_size)

    ids = tuple(token.id for token in inputs.tokens)
    num_prompt = len(ids) - request.num_generated
    prompt_ids = ids[:num_prompt]
    output_ids = ids[num_prompt:]
    max_tokens = len(output_ids) + 1

    generation_request = Request(prompt_ids, None, processors, max_tokens, seed=request.seed, trace=True)
    sequence = SequenceState(generation_request, max_tokens)
    sequence.events = [TokenEvent(token_id, "", 0.0, (), None) for token_id in output_ids]
    return sequence


def sample_token(sequence: SequenceState, logits: Tensor) -> SampledToken:
    """Sample one token as generate() would; raises a Fault if no token is allowed."""
    (sampled,) = sample(logits[None], [sequence])
    if isinstance(sampled, Fault):
        raise sampled
    return sampled


def describe_processor(processor: LogitsProcessor) -> dict[str, Any]:
    """The class name of a logits processor and its number, which the page translates."""
    settings = [getattr(processor, field.name) for field in fields(processor)]  # type: ignore[arg-type]
    value = next((setting for setting in settings if isinstance(setting, (int, float))), None)
    return {"name": type(processor).__name__, "value": value}


def count_allowed_tokens(sequence: SequenceState, logits: Tensor) -> list[int]:
    """The number of tokens with a logit above −∞: of the model, and after each processor.

    Counted before the softmax, in which a low temperature makes some probabilities too small for a float.
    """
    logits = logits[None]  # [1, V]
    counts = [int((logits > -torch.inf).sum())]
    for processor in sequence.request.processors:
        logits = processor(logits, [sequence.history])
        counts.append(int((logits > -torch.inf).sum()))
    return counts


def top_candidates(
    inputs: TokenizedInput, trace: Sequence[ProcessorTrace], token_id: int, num_candidates: int
) -> list[dict[str, Any]]:
    """The most probable tokens of the model and the sampled one, each with its probability after every processor."""
    ids = [candidate for candidate, _prob in trace[0].top(num_candidates)]
    if token_id not in ids:
        ids.append(token_id)
    candidates: list[dict[str, Any]] = []
    for candidate in ids:
        probs = [float(stage.probs[candidate]) for stage in trace]
        candidates.append({**_token_dict(inputs, candidate), "probs": to_jsonable(probs)})
    return candidates


def _token_dict(inputs: TokenizedInput, token_id: int) -> dict[str, Any]:
    return token_dicts([inputs.decode_token(token_id)])[0]


# -------------------------------------------------------------------------------------- masked tokens and logit lens


def fill_mask(open_model: OpenModel, request: FillMaskRequest) -> dict[str, Any]:
    """Predictions of an encoder at one position, whose token is masked where the tokenizer has a mask token."""
    inputs = tokenize_request(open_model, request)
    position = request.position
    if open_model.architecture != "encoder":
        raise BadInput(_("only an encoder fills masks; this model generates one token after another"))
    if not 0 <= position < len(inputs.tokens):
        n = len(inputs.tokens)
        raise BadInput(_("position must be below {n}, got {position}", n=n, position=position))

    original = inputs.tokens[position]
    mask_id = getattr(inputs.tokenizer, "mask_id", None)
    if mask_id is not None:
        inputs = mask_position(inputs, position, mask_id)

    head = lm_head(inputs.model)
    with eval_mode(inputs.model), torch.inference_mode():
        states, model_inputs = inputs.hidden_states()
        logits = head(states[:, position : position + 1], model_inputs)[0, 0].float()  # [V]
    trace = [ProcessorTrace("the model", logits.softmax(-1))]
    return {
        "tokens": token_dicts(inputs.tokens),
        "has_mask_token": mask_id is not None,
        "original_token": token_dicts([original])[0],
        "candidates": top_candidates(inputs, trace, original.id, request.num_candidates),
    }


def mask_position(inputs: TokenizedInput, position: int, mask_id: int) -> TokenizedInput:
    """The same tokens with the mask token at one position."""
    tokens = (*inputs.tokens[:position], Token(mask_id, "▢"), *inputs.tokens[position + 1 :])
    return replace(inputs, tokens=tokens)


def logit_lens_table(open_model: OpenModel, request: LogitLensRequest) -> dict[str, Any]:
    """The logit lens: the most probable tokens decoded from each layer's hidden state, at the last positions."""
    tokenize = tokenize_request if open_model.architecture == "encoder" else tokenize_prefix
    inputs = tokenize(open_model, request)
    first = max(0, len(inputs.tokens) - request.num_positions)
    result = lens(open_model.loaded, inputs, top_k=LENS_TOP_K, positions=range(first, len(inputs.tokens)))

    def cell(ids: Any, probs: Any) -> list[dict[str, Any]]:
        return [
            {**_token_dict(inputs, int(token_id)), "prob": to_jsonable(float(prob))}
            for token_id, prob in zip(ids, probs, strict=True)
        ]

    cells = [
        [cell(ids, probs) for ids, probs in zip(row_ids, row_probs, strict=True)]
        for row_ids, row_probs in zip(result.top_ids, result.top_probs, strict=True)
    ]  # [layers + 1, positions, top_k]
    return {
        "tokens": token_dicts(inputs.tokens[first:]),
        "layers": list(result.layers),
        "cells": cells,
        "entropy": to_jsonable(result.entropy),
        "next_tokens": token_dicts(result.prediction),
        "next_token_probs": to_jsonable(result.prediction_probs),
    }
