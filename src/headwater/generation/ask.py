"""headwater.generate: from a question in plain words to an answer.

    answer = headwater.generate(headwater.load("smollm2"), "Once upon a time", temperature=0.8, max_tokens=50)
    print(answer)                                   # its text; see answers.py for what else it knows

A model alone (without a tokenizer) is asked in token ids, and answers in them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor, nn

from headwater.errors import BadInput, TooLong
from headwater.generation.answers import Answer
from headwater.generation.beam import Beam, search
from headwater.generation.chance import branch, check_seed
from headwater.generation.choosers import Ban, Chooser, ForcedPrefix, named
from headwater.generation.engine import Engine
from headwater.generation.prefix import Prefix
from headwater.generation.requests import Event, Request, check, vocabulary
from headwater.generation.speculative import Draft, Drafter
from headwater.generation.stopping import NoText, Stream, stops
from headwater.parts import must

MOST_ANSWERS, MOST_ROWS, MOST_CHARACTERS, MOST_TRACE = 256, 32, 2**24, 2**29


class Tokenizer(Protocol):
    """What is asked of a tokenizer."""

    @property
    def bos(self) -> int | None: ...
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


def check_weights(model: Any) -> None:
    """A model on the meta device has shapes and no numbers."""
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise BadInput(
            "generate: the model must have weights, this one is on the meta device and has only shapes; load it "
            "(headwater.load), or build its spec: spec.build(seed=0)"
        )


@dataclass(frozen=True)
class Voice:
    """A model with what is needed to ask it in words: from what headwater.load gives, or from a model alone."""

    model: Any
    tokenizer: Any = None
    ends: tuple[int, ...] = ()
    start: int | None = None
    context: int | None = None
    rules: tuple[Chooser, ...] = ()

    @classmethod
    def of(cls, given: Any) -> Voice:
        if isinstance(given, Voice):
            return given
        check_weights(getattr(given, "model", given))
        if not hasattr(given, "tokenizer"):
            return cls(given)
        return cls(given.model, given.tokenizer, given.ends, given.start, given.longest, _rules(given.said))

    def ids(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a prompt in words or ids. Control tokens typed as text stay text."""
        if not isinstance(prompt, str):
            return tuple(prompt)
        if self.tokenizer is None:
            raise BadInput(
                f"generate: a model alone reads token ids, got the text {prompt[:40]!r}; give ids, or headwater.load"
            )
        most = MOST_CHARACTERS if self.context is None else min(MOST_CHARACTERS, 1024 * self.context)
        if len(prompt) > most:
            raise TooLong(f"generate: a prompt may have {most} characters, got {len(prompt)}; shorten it")
        if torn := re.search("[\ud800-\udfff]", prompt):
            raise BadInput(
                f"generate: a prompt must be whole text, got half a character at {torn.start()}; decode it as UTF-8"
            )
        ids = tuple(self.tokenizer.encode(prompt))
        return ids or (() if self.tokenizer.bos is None else (self.tokenizer.bos,))

    @property
    def reads_a_source(self) -> bool:
        return self.model.encoder is not None and self.model.decoder is not None


def _rules(said: Callable[[str], Any]) -> tuple[Chooser, ...]:
    """What a model's own files say about tokens that must or must never come. Taste (temperature …) is left to the
    user.
    """
    never = [t for t in said("suppress_tokens") or [] if type(t) is int and t >= 0]
    never += [word[0] for word in said("bad_words_ids") or [] if isinstance(word, list) and len(word) == 1]
    first = said("forced_bos_token_id")
    rules: tuple[Chooser, ...] = (Ban(tuple(never)),) if never else ()
    return (*rules, ForcedPrefix((first,))) if type(first) is int else rules


def requests(
    model: Any,
    prompts: Sequence[Any],
    *,
    max_tokens: int | None = None,
    stop: Any = (),
    seed: int | Sequence[int] = 0,
    prefix: Prefix | None = None,
    begin: Sequence[int] | None = None,
    alternatives: int = 0,
    trace: bool = False,
    seconds: float | None = None,
    **choosers: Any,
) -> list[Request]:
    """What generate was asked, as values."""
    voice = Voice.of(model)
    stop = (stop,) if isinstance(stop, (str, int)) else tuple(stop)
    texts = stops([one for one in stop if type(one) is not int])
    end = frozenset({*voice.ends, *(one for one in stop if type(one) is int)})
    must(voice.tokenizer is not None or not texts, "generate", "stop strings need a tokenizer", stop, "give token ids")
    chosen = (*voice.rules, *named(**choosers))
    made = []
    for given, own_seed in zip(prompts, _seeds(seed, len(prompts)), strict=True):
        prompt, source = voice.ids(given), None
        if voice.reads_a_source:
            source, prompt = prompt, _beginning(begin, voice)
        stream = NoText() if voice.tokenizer is None else Stream.after(voice.tokenizer.decode, prompt, texts)
        options = (max_tokens, end, own_seed, alternatives, trace, seconds, stream, prefix)
        request = Request(prompt, source, chosen, *options)
        limit = check(request, voice.model, voice.context)
        _check_trace(request, limit, vocabulary(voice.model))
        made.append(request)
    return made


def _seeds(seed: Any, count: int) -> list[int]:
    seeds = list(seed) if isinstance(seed, (list, tuple)) else [seed] * count
    must(
        len(seeds) == count,
        "generate",
        f"there must be one seed, or one for each of {count} prompts",
        len(seeds),
        "mend it",
    )
    for each in seeds:
        check_seed(each)
    return seeds


def _beginning(begin: Sequence[int] | None, voice: Voice) -> tuple[int, ...]:
    if begin is None and voice.start is None:
        raise BadInput("generate: a decoder needs a token to begin with, this model names none; give begin=[id]")
    return tuple(begin) if begin is not None else (voice.start or 0,)


def _check_trace(request: Request, limit: int, vocab: int) -> None:
    need = limit * vocab * 4 * (1 + len(request.choosers)) if request.trace else 0
    must(need <= MOST_TRACE, "generate", f"a trace may take {MOST_TRACE} bytes", need, "ask for fewer max_tokens")


def generate(model: Any, prompt: Any, *, n: int = 1, by: Beam | Drafter | None = None, **settings: Any) -> Any:
    """The answer to a prompt (text or ids); a list of prompts gives a list of answers, worked off together.

    n                   so many answers to each prompt, with different seeds: a list of them
    by                  Beam(4), or a drafter that guesses ahead: LookUp(), Draft(smaller_model)
    max_tokens          the longest answer; where it is not given, what fits, at most 256
    stop                strings or token ids that end it, beside the model's own; the text is cut before a string
    seed                the same seed gives the same text, alone or in a batch
    temperature         0 is greedy; higher is more varied. Greedy unless this or one of the next three is given
    top_k               only the K most probable tokens
    top_p               only the most probable tokens that make up this share (nucleus sampling)
    min_p               only tokens at least this many times as probable as the best
    repetition_penalty  above 1: tokens that were said become less probable
    frequency_penalty   subtracted from a logit for each time the token was said
    presence_penalty    subtracted from a logit once, if the token was said
    no_repeat_ngram     no run of N tokens twice
    ban                 token ids that never come
    allow               the only token ids that may come
    forced_prefix       token ids that come first
    alternatives        how many of the most probable tokens to report with each
    trace               all distributions, before and after every chooser
    prefix              a beginning that was read before (prefix.py)
    begin               the decoder's first ids, where a source is read
    seconds             a limit of time

    Where the model has an encoder and a decoder, the prompt is the source.
    """
    law = f"n must be from 1 to {MOST_ANSWERS}"
    must(type(n) is int and 1 <= n <= MOST_ANSWERS, "generate", law, n, "1 is usual")
    prompt = prompt.tolist() if isinstance(prompt, Tensor) else prompt
    single = isinstance(prompt, str) or _is_ids(prompt)
    asked = requests(model, [prompt] if single else prompt, **settings)
    voice = Voice.of(model)
    if isinstance(by, Beam):
        found = search(voice.model, asked, by, voice.context)
        answers = [[Answer.of(row, score=score) for row, score in one] for one in found]
    else:
        each = [replace(request, seed=branch(request.seed, i)) for request in asked for i in range(n)]
        flat = _together(voice, each, by)
        answers = [flat[i : i + n] for i in range(0, len(flat), n)]
    several = n > 1 or (isinstance(by, Beam) and by.answers > 1)
    told = answers if several else [one[0] for one in answers]
    return told[0] if single else told


def stream(model: Any, prompt: Any, *, by: Drafter | None = None, **settings: Any) -> Iterator[Event]:
    """The answer to one prompt, event by event: each has the text that is now certain. Takes what generate takes."""
    voice, (request,) = Voice.of(model), requests(model, [prompt], **settings)
    engine = _engine(voice, [request], by)
    row = engine.submit(request)
    for _, event in engine.stream():
        yield event
    if row.fault is not None:
        raise row.fault


def _together(voice: Voice, asked: Sequence[Request], by: Drafter | None) -> list[Answer]:
    engine = _engine(voice, asked, by)
    rows = [engine.submit(request) for request in asked]
    engine.run()
    return [Answer.of(row, acceptance=None if by is None else row.trust.acceptance) for row in rows]


def _engine(voice: Voice, asked: Sequence[Request], by: Drafter | None) -> Engine:
    needs = [len(request.prompt) + check(request, voice.model, voice.context) for request in asked]
    size = max(1, len(asked))
    most = 1 if isinstance(by, Draft) else MOST_ROWS  # a draft model keeps the text of one row
    bounds = {"rows": min(size, most), "columns": max(needs, default=1), "queue": size}
    return Engine(voice.model, **bounds, prefill=2048, context=voice.context, by=by)


def _is_ids(prompt: Any) -> bool:
    """One row of ids, rather than a list of prompts: its first element tells."""
    return isinstance(prompt, Sequence) and not (prompt and isinstance(prompt[0], Sequence))
