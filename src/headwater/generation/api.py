"""Text generation API: generate() and stream().

    completion = headwater.generate(headwater.load("smollm2"), "Once upon a time", temperature=0.8, max_tokens=50)
    print(completion)                               # its text; completion.py has the other fields

A model without a tokenizer reads token ids and gives token ids.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, ParamSpec, TypeVar

from torch import Tensor

from headwater.errors import BadSetting, nearest
from headwater.generation.beam import Beam, beam_search
from headwater.generation.completion import Completion
from headwater.generation.engine import Engine
from headwater.generation.guidance import Guidance, run_guided
from headwater.generation.prefix_cache import Prefix
from headwater.generation.request import TokenEvent, ValidRequest
from headwater.generation.sampling_params import SamplingParams
from headwater.generation.speculative import Draft, Drafter
from headwater.generation.text_model import AnyModel, TextModel, build_requests
from headwater.i18n import _
from headwater.parts import must
from headwater.rng import fork_seed

MAX_COMPLETIONS = 256
MAX_BATCH_SIZE = 32
MAX_PREFILL_TOKENS = 2048

P = ParamSpec("P")
R = TypeVar("R")


def _suggest_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Reject an unknown keyword argument with the nearest known name."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in names:
                raise BadSetting(
                    _("generation has no setting {name!r}; {nearest}", name=name, nearest=nearest(name, names))
                )
        return function(*args, **kwargs)

    return checked


@_suggest_keywords
def generate(
    model: AnyModel,
    prompt: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]] | Tensor,
    *,
    n: int = 1,
    strategy: Beam | Guidance | Drafter | None = None,
    params: SamplingParams | None = None,
    max_tokens: int | None = None,
    stop: str | int | Sequence[str | int] = (),
    seed: int | Sequence[int] = 0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    suppress_tokens: Sequence[int] | None = None,
    allowed_tokens: Sequence[int] | None = None,
    forced_prefix: Sequence[int] | None = None,
    top_logprobs: int = 0,
    trace: bool = False,
    prefix: Prefix | None = None,
    decoder_start_ids: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Any:
    """Generate the completion of a prompt; a list of prompts gives a list of completions, computed as a batch.

    model                 what headwater.load gives, or a model alone, which reads and gives token ids
    prompt                text or token ids, or a list of either; for an encoder-decoder it is the source
    n                     completions of each prompt, with different seeds: a list of them
    strategy              Beam(4), Guidance(empty_prompt_ids, 3.0), or a drafter: PromptLookup(), Draft(smaller_model)
    params                SamplingParams, in place of the single settings below
    max_tokens            maximum number of output tokens; where it is not given, what fits, at most 256
    stop                  strings or token ids that end the output, besides the model's own; the text is cut before it
    seed                  the same seed gives the same text, alone or in a batch; a list: one for each prompt
    temperature           0 is greedy; higher is more varied. Greedy unless this or one of the next three is given
    top_k                 only the K most probable tokens
    top_p                 only the most probable tokens whose probabilities sum to this (nucleus sampling)
    min_p                 only tokens at least this many times as probable as the most probable one
    repetition_penalty    above 1: tokens of the prompt and the output become less probable
    frequency_penalty     subtracted from a logit for each time the token occurs in the output
    presence_penalty      subtracted from a logit once, if the token occurs in the output
    no_repeat_ngram_size  no sequence of N tokens occurs twice
    suppress_tokens       token ids that are never sampled
    allowed_tokens        the only token ids that may be sampled
    forced_prefix         token ids that the output begins with
    top_logprobs          how many of the most probable tokens to report with each output token
    trace                 keep all distributions, before and after every logits processor
    prefix                a shared prefix whose KV cache was computed before (prefix_cache.py)
    decoder_start_ids     an encoder-decoder: the first ids of the decoder, in place of the model's own
    timeout               seconds after which the output ends
    """
    return _generate(model, prompt, n, strategy, _choose_params(params, locals()), prefix)


@_suggest_keywords
def stream(
    model: AnyModel,
    prompt: str | Sequence[int],
    *,
    strategy: Drafter | None = None,
    params: SamplingParams | None = None,
    max_tokens: int | None = None,
    stop: str | int | Sequence[str | int] = (),
    seed: int | Sequence[int] = 0,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    suppress_tokens: Sequence[int] | None = None,
    allowed_tokens: Sequence[int] | None = None,
    forced_prefix: Sequence[int] | None = None,
    top_logprobs: int = 0,
    trace: bool = False,
    prefix: Prefix | None = None,
    decoder_start_ids: Sequence[int] | None = None,
    timeout: float | None = None,
) -> Iterator[TokenEvent]:
    """Generate the completion of one prompt token by token; each event has the text that is now certain.

    model                 what headwater.load gives, or a model alone, which reads and gives token ids
    prompt                text or token ids; for an encoder-decoder it is the source
    strategy              a drafter for speculative decoding: PromptLookup(), Draft(smaller_model)
    params                SamplingParams, in place of the single settings below
    max_tokens            maximum number of output tokens; where it is not given, what fits, at most 256
    stop                  strings or token ids that end the output, besides the model's own; the text is cut before it
    seed                  the same seed gives the same text
    temperature           0 is greedy; higher is more varied. Greedy unless this or one of the next three is given
    top_k                 only the K most probable tokens
    top_p                 only the most probable tokens whose probabilities sum to this (nucleus sampling)
    min_p                 only tokens at least this many times as probable as the most probable one
    repetition_penalty    above 1: tokens of the prompt and the output become less probable
    frequency_penalty     subtracted from a logit for each time the token occurs in the output
    presence_penalty      subtracted from a logit once, if the token occurs in the output
    no_repeat_ngram_size  no sequence of N tokens occurs twice
    suppress_tokens       token ids that are never sampled
    allowed_tokens        the only token ids that may be sampled
    forced_prefix         token ids that the output begins with
    top_logprobs          how many of the most probable tokens to report with each output token
    trace                 keep all distributions, before and after every logits processor
    prefix                a shared prefix whose KV cache was computed before (prefix_cache.py)
    decoder_start_ids     an encoder-decoder: the first ids of the decoder, in place of the model's own
    timeout               seconds after which the output ends
    """
    return _stream(model, prompt, strategy, _choose_params(params, locals()), prefix)


def _choose_params(params: SamplingParams | None, arguments: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a call: its single settings, or params alone."""
    settings = SamplingParams(**{field.name: arguments[field.name] for field in fields(SamplingParams)})
    if params is None:
        return settings
    must(
        settings == SamplingParams(),
        "generate",
        _("settings must be given in params or one by one"),
        "both",
        _("use dataclasses.replace(params, ...)"),
    )
    return params


# ---------------------------------------------------------------------------------------------------- running requests


def _generate(
    model: AnyModel,
    prompt: Any,
    n: int,
    strategy: Beam | Guidance | Drafter | None,
    params: SamplingParams,
    prefix: Prefix | None,
) -> Any:
    """One completion, a list of them (several prompts, or several completions of one), or a list of lists."""
    must(
        type(n) is int and 1 <= n <= MAX_COMPLETIONS,
        "generate",
        _("n must be from 1 to {limit}", limit=MAX_COMPLETIONS),
        n,
        _("1 is usual"),
    )
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    is_single = isinstance(prompt, str) or _is_token_ids(prompt)
    requests = build_requests(model, [prompt] if is_single else prompt, params, prefix)
    text_model = TextModel.wrap(model)

    # completions[i]: those of prompt i, best first in beam search.
    if isinstance(strategy, Beam):
        beams = beam_search(text_model.model, requests, strategy, text_model.context_length)
        completions = [[Completion.from_sequence(sequence, score) for sequence, score in best] for best in beams]
        is_several = n > 1 or strategy.num_return_sequences > 1
    else:
        seeded = [replace(request, seed=fork_seed(request.seed, i)) for request in requests for i in range(n)]
        if isinstance(strategy, Guidance):
            states = run_guided(text_model.model, seeded, strategy, text_model.context_length)
            flat = [Completion.from_sequence(state) for state in states]
        else:
            flat = _run_batch(text_model, seeded, strategy)
        completions = [flat[first : first + n] for first in range(0, len(flat), n)]
        is_several = n > 1

    results: list[Any] = completions if is_several else [best[0] for best in completions]
    return results[0] if is_single else results


def _stream(
    model: AnyModel, prompt: str | Sequence[int], drafter: Drafter | None, params: SamplingParams, prefix: Prefix | None
) -> Iterator[TokenEvent]:
    (request,) = build_requests(model, [prompt], params, prefix)
    engine = _build_engine(TextModel.wrap(model), [request], drafter)
    sequence = engine.submit(request)
    for _unused, event in engine.stream():
        yield event
    if sequence.fault is not None:
        raise sequence.fault


def _run_batch(text_model: TextModel, requests: Sequence[ValidRequest], drafter: Drafter | None) -> list[Completion]:
    """The completions of requests that run together."""
    engine = _build_engine(text_model, requests, drafter)
    sequences = [engine.submit(request) for request in requests]
    engine.run()
    if drafter is None:
        return [Completion.from_sequence(sequence) for sequence in sequences]
    return [
        Completion.from_sequence(sequence, acceptance_rate=sequence.acceptance_tracker.acceptance_rate)
        for sequence in sequences
    ]


def _build_engine(text_model: TextModel, requests: Sequence[ValidRequest], drafter: Drafter | None) -> Engine:
    """An engine with a KV cache just large enough for the requests."""
    num_requests = max(1, len(requests))
    max_batch_size = 1 if isinstance(drafter, Draft) else MAX_BATCH_SIZE  # a draft model caches one sequence
    return Engine(
        text_model.model,
        max_num_seqs=min(num_requests, max_batch_size),
        max_seq_len=max((request.max_length for request in requests), default=1),
        max_queue_size=num_requests,
        max_prefill_tokens=MAX_PREFILL_TOKENS,
        context_length=text_model.context_length,
        drafter=drafter,
    )


def _is_token_ids(prompt: Any) -> bool:
    """Whether this is one prompt in token ids rather than a list of prompts, decided by its first element."""
    return isinstance(prompt, Sequence) and not (prompt and isinstance(prompt[0], Sequence))
