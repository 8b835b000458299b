"""Handlers for token attribution of one output, and for ablation of attention heads."""

from __future__ import annotations

from typing import Any

import torch

from headwater.core.heads import ClassificationHeadLayer
from headwater.core.modules import eval_mode
from headwater.inspection.ablation import ablate, head_importance
from headwater.inspection.attribution import MAX_COMPLETENESS_GAP, attribute
from headwater.inspection.inputs import Token, TokenizedInput
from headwater.inspection.logit_lens import lm_head
from headwater.inspection.results import to_jsonable
from headwater.serving.handlers.attention import token_dicts
from headwater.serving.handlers.next_token import mask_position
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import AblateHeadRequest, AblateLayerRequest, AttributionRequest, tokenize_request

MAX_ATTRIBUTION_TOKENS = 256  # each may cost a forward pass


def token_attribution(open_model: OpenModel, request: AttributionRequest) -> dict[str, Any]:
    """Attribution of the output's log-probability to the tokens.

    By integrated gradients where they are complete (sum to the output), else by occlusion.
    """
    inputs = tokenize_request(open_model, request, MAX_ATTRIBUTION_TOKENS)
    if request.position is None:
        position = default_position(open_model, inputs)
    else:
        position = _resolve_position(inputs, request.position)

    # The output to explain. Bidirectional attention would see it, so it is masked
    token_id = request.token_id
    if not inputs.causal and not isinstance(inputs.model.head, ClassificationHeadLayer):
        if token_id is None:
            token_id = inputs.tokens[position].id
        mask_id = getattr(inputs.tokenizer, "mask_id", None)
        if mask_id is not None:
            inputs = mask_position(inputs, position, mask_id)
    elif token_id is None and position < len(inputs.next_tokens):
        token_id = inputs.next_tokens[position].id

    result = attribute(open_model.loaded, inputs, position=position, token_id=token_id)
    if not result.completeness_gap <= MAX_COMPLETENESS_GAP:  # NaN too
        result = attribute(open_model.loaded, inputs, position=position, token_id=token_id, method="occlusion")
    return {
        "tokens": token_dicts(inputs.tokens),
        "source": token_dicts(inputs.source),
        "next_tokens": token_dicts(inputs.next_tokens),
        "attributions": to_jsonable(result.attributions),
        "source_attributions": to_jsonable(result.source_attributions),
        "position": result.position,
        "output": result.output,
        "method": result.method,
        "logprob": to_jsonable(result.logprob),
        "baseline_logprob": to_jsonable(result.baseline_logprob),
    }


def default_position(open_model: OpenModel, inputs: TokenizedInput) -> int:
    """The position explained where the request has none.

    Encoder-decoder: the target's least probable word. Encoder: the first word. Decoder: the last position. Special
    tokens such as <eos> and punctuation are skipped.
    """
    outputs: tuple[Token, ...] = ()
    if open_model.architecture == "encoder-decoder":
        outputs = inputs.next_tokens
    elif open_model.architecture == "encoder":
        outputs = inputs.tokens

    special_ids = _special_ids(inputs)
    words = [
        position
        for position, token in enumerate(outputs)
        if token.id not in special_ids and any(map(str.isalnum, token.text))
    ]
    if not words:
        return len(inputs.tokens) - 1
    if open_model.architecture == "encoder":
        return words[0]

    target_ids = torch.tensor([token.id for token in outputs])
    with eval_mode(inputs.model), torch.inference_mode():
        states, model_inputs = inputs.hidden_states()
        logprobs = lm_head(inputs.model)(states, model_inputs)[0].float().log_softmax(-1)  # [Q, V]
    target_logprobs = logprobs[: len(target_ids)].gather(1, target_ids[:, None])[:, 0]
    return min(words, key=lambda position: float(target_logprobs[position]))


def _special_ids(inputs: TokenizedInput) -> set[int]:
    """Ids of the special tokens."""
    tokenizer = inputs.tokenizer
    if tokenizer is None:
        return set()
    return {tokenizer.special_id(role) for role in tokenizer.special_tokens_map}


def _resolve_position(inputs: TokenizedInput, position: int) -> int:
    """A position within the tokens; -1 is the last."""
    last = len(inputs.tokens) - 1
    return last if position < 0 else min(position, last)


# -------------------------------------------------------------------------------------------------------- ablation


def ablate_head(open_model: OpenModel, request: AblateHeadRequest) -> dict[str, Any]:
    """Loss and predictions with one head ablated, and the KL divergence of the predictions at each position."""
    inputs = tokenize_request(open_model, request, MAX_ATTRIBUTION_TOKENS)
    position = _resolve_position(inputs, request.position)
    result = ablate(open_model.loaded, inputs, request.layer, request.head, kind=request.kind, position=position)
    candidates = [
        {**token_dicts([candidate.token])[0], "probs": to_jsonable([candidate.prob, candidate.ablated_prob])}
        for candidate in result.candidates
    ]
    return {
        "tokens": token_dicts(inputs.tokens),
        "source": token_dicts(inputs.source),
        "candidates": candidates,
        "loss": to_jsonable(result.loss),
        "ablated_loss": to_jsonable(result.ablated_loss),
        "kl_divergence": to_jsonable(result.kl_divergence),
        "position": position,
    }


def ablate_layer(open_model: OpenModel, request: AblateLayerRequest) -> dict[str, Any]:
    """Change of the loss without each head of one layer. One layer per request, so that others are served between."""
    inputs = tokenize_request(open_model, request, MAX_ATTRIBUTION_TOKENS)
    importance = head_importance(open_model.loaded, inputs, kind=request.kind, layers=[request.layer])
    return {
        "kind": importance.kind,
        "layer": request.layer,
        "loss": to_jsonable(importance.loss),
        "loss_change": to_jsonable(importance.loss_change[request.layer]),
    }
