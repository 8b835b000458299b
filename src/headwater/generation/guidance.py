"""Classifier-free guidance (Ho & Salimans 2022): away from what the model says without the prompt.

    logits = without + scale · (with - without)

Each sequence has two rows in the KV cache, one after its own prompt and one after the empty one; both get the token
that is sampled. scale 1 is the model itself, above 1 the prompt counts for more and the outputs vary less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headwater.core.model import Transformer
from headwater.errors import Fault
from headwater.generation.forward import encode_sources, forward_last
from headwater.generation.kv_cache import BatchKVCache
from headwater.generation.request import Request, SequenceState, ValidRequest, validate_request
from headwater.generation.sampling import sample
from headwater.i18n import _
from headwater.parts import must, part

MAX_BATCH_SEQUENCES = 16  # of a forward pass, which has two rows for each


@part
class Guidance:
    """Classifier-free guidance. empty: the ids of the empty prompt (of an encoder-decoder: of the empty source)."""

    empty: tuple[int, ...]
    scale: float = 3.0

    def __post_init__(self) -> None:
        must(0 <= self.scale <= 1000, self, _("scale must be from 0 to 1000"), self.scale, _("3 is usual, 1 is none"))
        must(bool(self.empty), self, _("empty must have at least one token"), self.empty, _("give the start token"))

    def without_prompt(self, request: Request) -> Request:
        """The same request after the empty prompt."""
        if request.source_ids is not None:
            return replace(request, source_ids=self.empty)
        return replace(request, prompt_ids=self.empty)


def run_guided(
    model: Transformer, requests: Sequence[Request], guidance: Guidance, context_length: int | None = None
) -> list[SequenceState]:
    """Run requests with guidance. The output of a request does not depend on the others."""
    states = []
    for first in range(0, len(requests), MAX_BATCH_SEQUENCES):
        states += list(stream_guided(model, requests[first : first + MAX_BATCH_SEQUENCES], guidance, context_length))[
            -1
        ]
    return states


def stream_guided(
    model: Transformer, requests: Sequence[Request], guidance: Guidance, context_length: int | None = None
) -> Iterator[list[SequenceState]]:
    """The sequences of all requests, yielded before the first token and after each."""
    guided = [validate_request(request, model, context_length) for request in requests]
    unguided = [_check_empty(guidance, request, model, context_length) for request in guided]
    states = [SequenceState(request, request.max_new_tokens) for request in guided]
    yield states

    # prefill: the rows with their prompts, then those without
    running = [state for state in states if not state.finish_reason]
    rows = [*guided, *unguided]
    cache = BatchKVCache(model, [*states, *states])
    if guided and guided[0].source_ids is not None:
        encode_sources(model, cache, [request.source_ids or () for request in rows])
    logits = forward_last(model, cache, [request.prompt_ids for request in rows]) if running else None

    while running and logits is not None:
        # one token for each sequence, in both of its rows
        with_prompt, without = logits.chunk(2)  # [B, V]
        sampled = sample(without + guidance.scale * (with_prompt - without), running)
        for state, token in zip(running, sampled, strict=True):
            if isinstance(token, Fault):
                state.fault = token
            else:
                state.append(token)
        yield states

        # the rows of those that go on
        going = [i for i, state in enumerate(running) if not state.finish_reason]
        cache.reorder([*going, *(len(running) + i for i in going)])
        running = [running[i] for i in going]
        if running:
            logits = forward_last(model, cache, [state.output_ids[-1:] for state in running] * 2)


def _check_empty(
    guidance: Guidance, request: ValidRequest, model: Transformer, context_length: int | None
) -> ValidRequest:
    """The request after the empty prompt, validated like any other."""
    empty = guidance.without_prompt(Request(request.prompt_ids, request.source_ids, max_tokens=request.max_new_tokens))
    return validate_request(empty, model, context_length)
