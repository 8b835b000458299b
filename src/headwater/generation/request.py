"""Generation requests, the state of a running sequence, and the acceptance rate of its drafts.

A Request is a value. A SequenceState is its life in a batch: it only grows, by one TokenEvent at a time, and everything
else about it is read off its events. So a step that is interrupted anywhere leaves each sequence as it was, or one
complete token longer.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from headwater.core.model import Transformer
from headwater.core.stack import TransformerStack
from headwater.errors import BadInput, BadSetting, Fault, TooLong
from headwater.generation.sampling import Greedy, LogitsProcessor, TokenHistory
from headwater.generation.streaming import NoTextStream, TextStream
from headwater.i18n import _
from headwater.parts import must
from headwater.rng import check_seed

if TYPE_CHECKING:
    from headwater.generation.prefix_cache import Prefix
    from headwater.generation.sampling import ProcessorTrace, SampledToken

MAX_TOKENS = 1_000_000
DEFAULT_MAX_TOKENS = 256


class FinishReason(StrEnum):
    """Why a sequence ended."""

    EOS = "eos"  # an end-of-sequence token, the model's own or one of the request
    STOP = "stop"  # a stop string
    LENGTH = "length"  # max_tokens
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True)
class Request:
    """One prompt with everything that decides its output.

    prompt_ids: the ids that the output follows; for an encoder-decoder the decoder's first ids, the text to read being
    source_ids. stop_token_ids: tokens that end the output. top_logprobs: how many of the most probable tokens to report
    with each. trace: keep the distributions of every step. timeout: in seconds. text_stream: how tokens become text
    (streaming.py). prefix: a shared prefix with its KV cache (prefix_cache.py). adapter: the name of the adapter that
    answers it (headwater.tuning); None: the one that acts on the model, if any.
    """

    prompt_ids: tuple[int, ...]
    source_ids: tuple[int, ...] | None = None
    processors: tuple[LogitsProcessor, ...] = (Greedy(),)
    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    top_logprobs: int = 0
    trace: bool = False
    timeout: float | None = None
    text_stream: TextStream | NoTextStream = field(default_factory=NoTextStream, compare=False)
    prefix: Prefix | None = field(default=None, compare=False)
    adapter: str | None = None


@dataclass(frozen=True)
class ValidRequest(Request):
    """A request that validate_request() accepted. max_new_tokens: the maximum number of its output tokens."""

    max_new_tokens: int = 0

    @property
    def max_length(self) -> int:
        """The maximum length of the sequence: prompt and output together."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True)
class TokenEvent:
    """One output token.

    text: the text it released. logprob, top_logprobs: the model's own, before any logits processor. finish_reason: why
    it was the last token, else None. text_stream: the state of the text after it.
    """

    token: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: FinishReason | None
    trace: tuple[ProcessorTrace, ...] = ()
    text_stream: TextStream | NoTextStream = field(default_factory=NoTextStream)


class SequenceState:
    """A request and its output so far, as events.

    acceptance_tracker: how many of its drafted tokens were accepted (speculative.py).
    """

    def __init__(self, request: Request, max_new_tokens: int) -> None:
        self.request = request
        self.max_new_tokens = max_new_tokens
        self.events: list[TokenEvent] = []
        self.cancelled = False
        self.fault: Fault | None = None
        self.acceptance_tracker = AcceptanceTracker()
        self.deadline = None if request.timeout is None else time.monotonic() + request.timeout

    @property
    def output_ids(self) -> list[int]:
        return [event.token for event in self.events]

    def tokens_from(self, position: int) -> list[int]:
        """The tokens of prompt and output from a position on."""
        prompt = self.request.prompt_ids
        first_event = max(0, position - len(prompt))
        return [*prompt[position:], *(event.token for event in self.events[first_event:])]

    def __len__(self) -> int:
        return len(self.request.prompt_ids) + len(self.events)

    @property
    def history(self) -> TokenHistory:
        return TokenHistory(self.request.prompt_ids, self.output_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ended; None while it runs."""
        if self.events and self.events[-1].finish_reason:
            return self.events[-1].finish_reason
        if not self.max_new_tokens:
            return FinishReason.LENGTH
        if self.cancelled:
            return FinishReason.CANCELLED
        return None if self.fault is None else FinishReason.ERROR

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def append(self, sampled: SampledToken) -> TokenEvent:
        """Append one token, decode the text it releases and decide whether it is the last."""
        stream = self.events[-1].text_stream if self.events else self.request.text_stream
        is_eos = sampled.token in self.request.stop_token_ids
        text = ""
        if not is_eos:
            text, stream = stream.push(sampled.token)

        finish_reason = self._finish_reason_after(is_eos, stream.stop_found)
        if finish_reason:
            text += stream.flush()
        event = TokenEvent(
            sampled.token, text, sampled.logprob, sampled.top_logprobs, finish_reason, sampled.trace, stream
        )
        self.events.append(event)
        return event

    def _finish_reason_after(self, is_eos: bool, stop_found: bool) -> FinishReason | None:
        """Whether one more token ends the sequence."""
        is_late = self.deadline is not None and time.monotonic() >= self.deadline
        if is_eos:
            return FinishReason.EOS
        if stop_found:
            return FinishReason.STOP
        if len(self.events) + 1 >= self.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.TIMEOUT if is_late else None


# ------------------------------------------------------------------------------------------- validation of requests


def vocab_size(model: Transformer) -> int:
    """The number of tokens that the language-model head predicts."""
    size = getattr(model.spec.head, "vocab", None)
    if size is None:
        raise BadInput(
            _(
                "generate: the model must have a language head, this one has {head!r}; load another",
                head=model.spec.head,
            )
        )
    return int(size)


def validate_request(request: Request, model: Transformer, context_length: int | None = None) -> ValidRequest:
    """Validate a request before anything is computed. One that has been validated is returned as it is.

    Prompt and output together must fit the positions. Where max_tokens is not given, the output gets what is left, at
    most DEFAULT_MAX_TOKENS.
    """
    if isinstance(request, ValidRequest):
        return request
    _check_settings(request, vocab_size(model))

    # positions
    limits = [limit for limit in (model.output_stack.spec.max_positions, context_length) if limit is not None]
    max_positions = min(limits, default=None)
    prompt_length = len(request.prompt_ids)
    max_tokens = request.max_tokens
    min_new_tokens = 1 if max_tokens is None else max_tokens
    if max_positions is not None and prompt_length + min_new_tokens > max_positions:
        output = "" if max_tokens is None else _(" and {max_tokens} to follow", max_tokens=max_tokens)
        raise TooLong(
            _(
                "generate: there are {max_positions} positions, got a prompt of {prompt_length} tokens{output}; "
                "shorten one of them",
                max_positions=max_positions,
                prompt_length=prompt_length,
                output=output,
            )
        )

    # token ids
    _check_ids("prompt", request.prompt_ids, _num_embeddings(model.output_stack))
    _check_source(request, model)

    if max_tokens is None:
        max_tokens = min(DEFAULT_MAX_TOKENS, (max_positions or MAX_TOKENS) - prompt_length)
    values = {field.name: getattr(request, field.name) for field in fields(request)}
    return ValidRequest(**values, max_new_tokens=max_tokens)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise BadInput unless there is a token, and all of them are in the vocabulary."""
    if not ids:
        raise BadInput(
            _(
                "generate: the {name} must have at least one token, got none; this model has no token to begin with",
                name=name,
            )
        )
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise BadInput(
                _(
                    "generate: {name} ids must be from 0 to {max_id}, got {token!r:.40}; is it another tokenizer's?",
                    name=name,
                    max_id=vocab_size - 1,
                    token=token,
                )
            )


def _check_settings(request: Request, vocab_size: int) -> None:
    """Validate everything but the token ids of a request."""
    max_tokens = request.max_tokens
    must(
        max_tokens is None or (type(max_tokens) is int and 0 <= max_tokens <= MAX_TOKENS),
        "generate",
        _("max_tokens must be from 0 to {limit}", limit=MAX_TOKENS),
        max_tokens,
        _("256 is usual"),
    )
    must(
        type(request.top_logprobs) is int and 0 <= request.top_logprobs <= vocab_size,
        "generate",
        _("top_logprobs must be from 0 to {vocab_size}", vocab_size=vocab_size),
        request.top_logprobs,
        _("5 is usual"),
    )
    must(
        request.timeout is None or (isinstance(request.timeout, (int, float)) and 0 < request.timeout < 1e9),
        "generate",
        _("timeout must be above 0"),
        request.timeout,
        _("leave it out for no limit"),
    )
    check_seed(request.seed)

    # logits processors and stop tokens must be of this vocabulary
    for processor in request.processors:
        if not isinstance(processor, LogitsProcessor):
            raise BadSetting(
                _(
                    "generate: processors must be values such as TopK(5), got {processor!r:.60}; see "
                    "headwater.generation.sampling",
                    processor=processor,
                )
            )
        processor.check_vocab(vocab_size)
    out_of_range = [token for token in request.stop_token_ids if type(token) is not int or not 0 <= token < vocab_size]
    must(
        not out_of_range,
        "generate",
        _("stop tokens must be from 0 to {max_id}", max_id=vocab_size - 1),
        out_of_range[:1],
        _("is it another tokenizer's?"),
    )


def _num_embeddings(stack: TransformerStack) -> int:
    """The number of tokens in the embedding table of a stack, plain or quantized."""
    table: Any = stack.embed.tokens
    return int(table.num_embeddings)


def _check_source(request: Request, model: Transformer) -> None:
    """Check that there is a source exactly where the model has an encoder and a decoder, and its ids."""
    needs_source = model.encoder is not None and model.decoder is not None
    if needs_source and request.source_ids is None:
        raise BadInput(_("generate: the model reads a source and needs one, got none; give source_ids=..."))
    if not needs_source and request.source_ids is not None:
        raise BadInput(_("generate: the model has one stack and takes no source, got one; leave out source_ids=..."))
    if request.source_ids is None or model.encoder is None:
        return
    _check_ids("source", request.source_ids, _num_embeddings(model.encoder))
    max_positions = model.encoder.spec.max_positions
    if max_positions is not None and len(request.source_ids) > max_positions:
        raise TooLong(
            _(
                "generate: there are {max_positions} positions for the source, got {length} tokens; shorten it",
                max_positions=max_positions,
                length=len(request.source_ids),
            )
        )


# --------------------------------------------------------------------------------------- acceptance rate of the drafts

# A step that verifies five or more tokens takes about as long as three steps of one token. So drafts pay while two or
# more tokens of a draft are accepted.
MIN_ACCEPTED = 2
MAX_BACKOFF = 32  # steps


@dataclass
class AcceptanceTracker:
    """Adaptive speculation: back off exponentially, up to MAX_BACKOFF steps, while drafts are rejected.

    A text that cannot be predicted then costs next to nothing. drafted, accepted: numbers of tokens so far.
    """

    drafted: int = 0
    accepted: int = 0
    steps_to_wait: int = 0
    backoff: int = 0

    def should_draft(self) -> bool:
        """Whether the next step may verify a draft; called once per step."""
        self.steps_to_wait = max(0, self.steps_to_wait - 1)
        return not self.steps_to_wait

    def update(self, drafted: int, accepted: int) -> None:
        """Count a verified draft, and wait longer if it did not pay."""
        self.drafted += drafted
        self.accepted += accepted
        if drafted:
            paid = accepted >= min(MIN_ACCEPTED, drafted)
            self.backoff = 0 if paid else min(MAX_BACKOFF, max(1, 2 * self.backoff))
            self.steps_to_wait = self.backoff + 1

    @property
    def acceptance_rate(self) -> float:
        """The fraction of the drafted tokens that were accepted."""
        return self.accepted / max(1, self.drafted)
