"""Handler for streamed generation (chat, continuation, translation) and for label prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from headwater.core.modules import eval_mode
from headwater.errors import BadInput
from headwater.generation.api import TextModel, stream
from headwater.i18n import _
from headwater.inspection.logit_lens import has_lm_head
from headwater.serving.model_store import OpenModel
from headwater.serving.schemas import MAX_PROMPT_TOKENS, ChatRequest, check_num_tokens
from headwater.text.chat import encode_chat

GENERATION_TIMEOUT = 120.0  # seconds


def stream_chat(open_model: OpenModel, request: ChatRequest) -> Iterator[dict[str, Any]]:
    """Events of a streamed generation.

    {"text", "token", "prob"} for each token, then {"finish_reason", "completion_tokens", "prompt_tokens", "ids",
    "source_ids"}. A classifier has one event: {"labels"} or {"tags"}.
    """
    inspected = open_model.inspected
    if not has_lm_head(inspected.model) or open_model.architecture == "encoder":
        yield predict_labels(open_model, request)
        return

    # one event for each token
    prompt_ids = check_num_tokens(_prompt_ids(open_model, request), MAX_PROMPT_TOKENS)
    output_ids: list[int] = []
    finish_reason = "length"
    settings = {
        **request.sampling_options(),
        "seed": request.seed,
        "max_tokens": request.max_tokens,
        "timeout": GENERATION_TIMEOUT,
    }
    for event in stream(inspected.text_model, prompt_ids, **settings):
        output_ids.append(event.token)
        finish_reason = event.finish_reason or finish_reason
        prob = float(torch.tensor(event.logprob).exp())
        yield {"text": event.text, "token": event.token, "prob": round(prob, 6)}

    # the last event: the finish reason, and the ids of the conversation
    counts = {"finish_reason": finish_reason, "completion_tokens": len(output_ids), "prompt_tokens": len(prompt_ids)}
    if inspected.is_encoder_decoder:
        target_ids = output_ids[:-1] if output_ids and output_ids[-1] in inspected.eos_ids else output_ids
        yield {**counts, "ids": [inspected.decoder_start_id, *target_ids], "source_ids": prompt_ids}
    else:
        yield {**counts, "ids": [*prompt_ids, *output_ids], "source_ids": []}


def _prompt_ids(open_model: OpenModel, request: ChatRequest) -> list[int]:
    """Token ids of the source, of the chat messages or of the text."""
    inspected = open_model.inspected
    if inspected.is_encoder_decoder:
        return inspected.encode_prompt(request.source or request.text)
    if request.messages:
        if inspected.tokenizer is None or not inspected.tokenizer.chat_template:
            raise BadInput(_("this model has no chat template; give it a text to complete"))
        return encode_chat(inspected.tokenizer, [message.model_dump() for message in request.messages])
    return list(TextModel.wrap(inspected.text_model).encode_prompt(inspected.encode_prompt(request.text)))


def predict_labels(open_model: OpenModel, request: ChatRequest) -> dict[str, Any]:
    """Output of a classifier: the probabilities of a text's labels, or the most probable tag of each token."""
    inspected = open_model.inspected
    labels = inspected.labels
    if not labels:
        raise BadInput(
            _("this model neither generates text nor predicts labels; see its attention, or use headwater embed")
        )
    ids = check_num_tokens(inspected.encode_prompt(request.text))
    with eval_mode(inspected.model), torch.inference_mode():
        probs = inspected.model(torch.tensor([ids]))[0].float().softmax(-1)  # [labels] or [tokens, labels]
    if probs.dim() == 1:
        order = probs.argsort(descending=True).tolist()
        return {"labels": [[labels[n], round(float(probs[n]), 6)] for n in order[:50]], "ids": ids}
    best = probs.max(-1)
    tags = [[labels[int(n)], round(float(prob), 6)] for n, prob in zip(best.indices, best.values, strict=True)]
    return {"tags": tags, "ids": ids}
