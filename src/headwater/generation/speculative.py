"""Speculative decoding: several tokens are guessed, and the model reads them all at once and keeps those it would
have said.

Noise is tied to (seed, step, token), see chance.py; so the token the model would have chosen at each step is known
the moment its scores are, and a guess is right or it is not. The text is the one there would have been without
guessing: greedy or sampled, with any choosers. A drafter only decides how many guesses come true.

    Draft(model)      a smaller model of the same vocabulary guesses, with the same choosers and the same noise
    LookUp()          the text so far guesses: where its last tokens occurred before, what followed them there

The engine asks the drafter before each step (engine.py); rejected guesses leave the cache by a smaller length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from headwater.errors import BadSetting, Fault
from headwater.generation.picking import choose
from headwater.generation.reading import read
from headwater.generation.requests import Request, Row, places, vocabulary
from headwater.generation.slots import Slots
from headwater.parts import must, part


class Drafter(Protocol):
    def guess(self, row: Row, count: int) -> Sequence[int]:
        """At most count tokens that may follow the row."""
        ...


@part
class LookUp:
    """The longest run of at most `longest` last tokens that occurred before, its latest occurrence, and what
    followed.
    """

    longest: int = 3

    def __post_init__(self) -> None:
        must(1 <= self.longest <= 32, self, "longest must be from 1 to 32", self.longest, "3 is usual")

    def guess(self, row: Row, count: int) -> Sequence[int]:
        text = [*(row.request.source or ()), *row.after(0)]
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            last = text[-size:]
            for at in range(len(text) - size - 1, -1, -1):
                if text[at : at + size] == last:
                    return text[at + size : at + size + count]
        return ()


class Draft:
    """A smaller model that reads the row's text too. It serves one row at a time."""

    def __init__(self, model: Any) -> None:
        self.model, self.slots, self.read = model, Slots(model, [None]), list[int]()
        if model.encoder is not None and model.decoder is not None:
            raise BadSetting("Draft: the draft model must have one stack, got an encoder-decoder; use LookUp()")

    def guess(self, row: Row, count: int) -> Sequence[int]:
        room = places(self.model.writer)
        count = count if room is None else min(count, room - len(row))
        ahead = _shadow(row)
        for _ in range(max(0, count)):
            text = ahead.after(0)
            self.slots.crop([min(_alike(self.read, text), len(text) - 1)])
            scores = read(self.model, self.slots, [text[self.slots.lengths[0] :]])
            self.read = text
            choice = choose(scores, [ahead])[0]
            if isinstance(choice, Fault) or ahead.take(choice).stopped:
                break
        return ahead.new[len(row.events) :]


def _alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two texts have in common."""
    most = min(len(a), len(b))
    return next((i for i in range(most) if a[i] != b[i]), most)


def _shadow(row: Row) -> Row:
    """The same row, to be continued on trial: without text, for only its tokens matter."""
    request = row.request
    plain = Request(request.prompt, choosers=request.choosers, end=request.end, seed=request.seed)
    shadow = Row(plain, row.limit)
    shadow.events = list(row.events)
    return shadow


def fits(drafter: Drafter, model: Any) -> None:
    """Refuse a draft model that speaks of other tokens."""
    if isinstance(drafter, Draft) and vocabulary(drafter.model) != vocabulary(model):
        sizes = vocabulary(drafter.model), vocabulary(model)
        raise BadSetting(
            f"Draft: both models must have one vocabulary, got {sizes[0]} and {sizes[1]}; choose a relative"
        )
