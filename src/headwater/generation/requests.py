"""What is asked, and what has been answered so far.

A Request is a value. A Row is its life in a batch: it only ever grows by one Event at a time, and everything else
about it is read off its events, so a step that is interrupted anywhere leaves rows as they were or one whole token
further.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from headwater.core.positions import LearnedTable
from headwater.errors import BadInput, BadSetting, Fault, TooLong
from headwater.generation.chance import check_seed
from headwater.generation.choosers import Chooser, Greedy, Said
from headwater.generation.stopping import NoText
from headwater.generation.trust import Trust
from headwater.parts import must

if TYPE_CHECKING:
    from headwater.generation.picking import Choice
    from headwater.generation.prefix import Prefix

MOST_TOKENS = 1_000_000
USUAL_TOKENS = 256


@dataclass(frozen=True)
class Request:
    """prompt: ids the answer follows; for an encoder-decoder the decoder's beginning, with the text to read in source.

    end: tokens that end the answer. alternatives: how many of the most probable tokens to report with each. trace:
    keep the distributions at every step. seconds: a limit on the time. stream: how tokens become text (see
    stopping.py).
    """

    prompt: tuple[int, ...]
    source: tuple[int, ...] | None = None
    choosers: tuple[Chooser, ...] = (Greedy(),)
    max_tokens: int | None = None
    end: frozenset[int] = frozenset()
    seed: int = 0
    alternatives: int = 0
    trace: bool = False
    seconds: float | None = None
    stream: Any = field(default_factory=NoText, compare=False)
    prefix: Prefix | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Event:
    """One token: the text it released, log-probabilities the model gave before any chooser, why it was the last (or
    None).
    """

    token: int
    text: str
    logprob: float
    alternatives: tuple[tuple[int, float], ...]
    stopped: str | None
    stages: tuple[Any, ...] = ()
    stream: Any = None


class Row:
    """A request and its events. stopped: end, stop, length, time, cancelled, fault; None while it runs. trust: in what
    is guessed of it (speculative.py).
    """

    def __init__(self, request: Request, limit: int) -> None:
        self.request, self.limit = request, limit
        self.events: list[Event] = []
        self.cancelled, self.fault = False, cast("Fault | None", None)
        self.trust = Trust()
        self.deadline = None if request.seconds is None else time.monotonic() + request.seconds

    @property
    def new(self) -> list[int]:
        return [event.token for event in self.events]

    def after(self, place: int) -> list[int]:
        """The tokens of prompt and answer from a place on."""
        prompt = self.request.prompt
        return [*prompt[place:], *(event.token for event in self.events[max(0, place - len(prompt)) :])]

    def __len__(self) -> int:
        return len(self.request.prompt) + len(self.events)

    @property
    def said(self) -> Said:
        return Said(self.request.prompt, self.new)

    @property
    def stopped(self) -> str | None:
        if self.events and self.events[-1].stopped:
            return self.events[-1].stopped
        ended = {"length": not self.limit, "cancelled": self.cancelled, "fault": self.fault is not None}
        return next((why for why, so in ended.items() if so), None)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events)

    def take(self, choice: Choice) -> Event:
        """Grow by one token."""
        stream = self.events[-1].stream if self.events else self.request.stream
        ends = choice.token in self.request.end
        text, stream = ("", stream) if ends else stream.feed(choice.token)
        late = self.deadline is not None and time.monotonic() >= self.deadline
        full = len(self.events) + 1 >= self.limit
        stopped = "end" if ends else "stop" if stream.cut else "length" if full else "time" if late else None
        text += stream.rest() if stopped else ""
        event = Event(choice.token, text, choice.logprob, choice.alternatives, stopped, choice.stages, stream)
        self.events.append(event)
        return event


# --------------------------------------------------------------------------------------- what a model has room for


def vocabulary(model: Any) -> int:
    size = getattr(model.spec.head, "vocab", None)
    if size is None:
        raise BadInput(f"generate: the model must have a language head, this one has {model.spec.head!r}; load another")
    return int(size)


def places(stack: Any) -> int | None:
    """How many tokens a stack's learned positions have room for; None without end."""
    owned = (
        getattr(stack.embed, "position", None),
        *stack.positions,
    )  # not all modules: this is asked for every request
    return min((p.table.num_embeddings - p.first for p in owned if isinstance(p, LearnedTable)), default=None)


def check(request: Request, model: Any, context: int | None = None) -> int:
    """Refuse what cannot be answered, before anything is read. Gives the number of tokens the answer may have.

    prompt and answer together must fit; where max_tokens is not given the answer gets what is left, at most
    USUAL_TOKENS.
    """
    vocab, room = vocabulary(model), min((n for n in (places(model.writer), context) if n is not None), default=None)
    _check_settings(request, vocab)
    prompt, wanted = len(request.prompt), request.max_tokens
    if room is not None and prompt + (1 if wanted is None else wanted) > room:
        asked = "" if wanted is None else f" and {wanted} to follow"
        raise TooLong(f"generate: there are {room} places, got a prompt of {prompt} tokens{asked}; shorten one of them")
    _check_ids("prompt", request.prompt, model.writer.embed.tokens.num_embeddings)
    _check_source(request, model)
    return wanted if wanted is not None else min(USUAL_TOKENS, (room or MOST_TOKENS) - prompt)


def _check_ids(what: str, ids: Sequence[int], vocab: int) -> None:
    if not ids:
        raise BadInput(
            f"generate: the {what} must have at least one token, got none; this model has no token to begin with"
        )
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab:
            raise BadInput(
                f"generate: {what} ids must be from 0 to {vocab - 1}, got {token!r:.40}; is it another tokenizer's?"
            )


def _check_settings(request: Request, vocab: int) -> None:
    tokens, alternatives, seconds = request.max_tokens, request.alternatives, request.seconds
    right = tokens is None or (type(tokens) is int and 0 <= tokens <= MOST_TOKENS)
    must(right, "generate", f"max_tokens must be from 0 to {MOST_TOKENS}", tokens, "256 is usual")
    right = type(alternatives) is int and 0 <= alternatives <= vocab
    must(right, "generate", f"alternatives must be from 0 to {vocab}", alternatives, "5 is usual")
    must(
        seconds is None or 0 < seconds < 1e9,
        "generate",
        "seconds must be above 0",
        seconds,
        "leave it out for no limit",
    )
    check_seed(request.seed)
    for chooser in request.choosers:
        if not isinstance(chooser, Chooser):
            raise BadSetting(
                f"generate: choosers must be values such as TopK(5), got {chooser!r:.60}; see generation.choosers"
            )
        chooser.check(vocab)
    beyond = [t for t in request.end if type(t) is not int or not 0 <= t < vocab]
    must(not beyond, "generate", f"end tokens must be from 0 to {vocab - 1}", beyond[:1], "is it another tokenizer's?")


def _check_source(request: Request, model: Any) -> None:
    both = model.encoder is not None and model.decoder is not None
    if both != (request.source is not None):
        came = "none" if both else "one"
        need = "reads a source and needs one" if both else "has one stack and takes no source"
        raise BadInput(f"generate: the model {need}, got {came}; {'give' if both else 'leave out'} source=...")
    if request.source is None:
        return
    _check_ids("source", request.source, model.encoder.embed.tokens.num_embeddings)
    room = places(model.encoder)
    if room is not None and len(request.source) > room:
        raise TooLong(f"generate: there are {room} places for the source, got {len(request.source)} tokens; shorten it")
