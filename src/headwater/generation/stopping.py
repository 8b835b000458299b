"""From tokens to text as it comes: only whole characters are released, and nothing that may still become a stop string.

A token may be a part of a character, and its text may depend on the token before it; so text is always decoded
together with the last tokens that gave some. A stop string is looked for character by character, however the tokens
cut it: the one that is complete first ends the text before its own beginning (of several that end together, the
longest). All states are values: feed() gives the text that is now certain and the next state, and an interrupted step
changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from headwater.parts import must

MOST_STOPS, LONGEST_STOP = 64, 1000
TORN = "\ufffd"  # what a decoder writes for a character that is not whole


@dataclass(frozen=True)
class Stop:
    """One stop string, and for each of its beginnings how long a shorter beginning it ends with (Knuth, Morris,
    Pratt).
    """

    text: str

    @cached_property
    def falls(self) -> list[int]:
        falls, size = [0], 0
        for character in self.text[1:]:
            while size and self.text[size] != character:
                size = falls[size - 1]
            size += self.text[size] == character
            falls.append(size)
        return falls

    def after(self, matched: int, character: str) -> int:
        """How much of it the text ends with, one character later."""
        if matched == len(self.text):
            matched = self.falls[-1]
        while matched and self.text[matched] != character:
            matched = self.falls[matched - 1]
        return matched + (self.text[matched] == character)


def stops(texts: str | Sequence[str]) -> tuple[Stop, ...]:
    """Stop strings, checked."""
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    law = f"stop must be at most {MOST_STOPS} strings"
    must(len(texts) <= MOST_STOPS, "generate", law, len(texts), "use fewer, or stop by yourself while streaming")
    for text in texts:
        right = isinstance(text, str) and 1 <= len(text) <= LONGEST_STOP
        law = f"a stop string must have 1 to {LONGEST_STOP} characters"
        must(right, "generate", law, len(text) if isinstance(text, str) else text, "shorten it or leave it out")
    return tuple(map(Stop, dict.fromkeys(texts)))


@dataclass(frozen=True)
class Stream:
    """ids: the last tokens that gave text (`known` of them), and those since; held: text that may become a stop
    string.
    """

    decode: Callable[[Sequence[int]], str]
    stops: tuple[Stop, ...] = ()
    ids: tuple[int, ...] = ()
    known: int = 0
    held: str = ""
    matched: tuple[int, ...] = field(default=())
    cut: bool = False

    @classmethod
    def after(
        cls, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: tuple[Stop, ...] = ()
    ) -> Stream:
        """The stream of what follows a prompt: whether a word begins with a space may depend on its last tokens."""
        context = tuple(prompt[-8:])
        return cls(decode, stops, context, len(context), matched=(0,) * len(stops))

    def feed(self, token: int) -> tuple[str, Stream]:
        """The text that is now certain, and the stream after the token."""
        ids = (*self.ids, token)
        before, whole = self.decode(ids[: self.known]), self.decode(ids)
        if whole.endswith(TORN) or len(whole) <= len(before):
            return "", replace(self, ids=ids)
        settled = replace(self, ids=ids[self.known :], known=len(ids) - self.known)
        return settled._match(whole[len(before) :])

    def rest(self) -> str:
        """What was held back, when no token will follow."""
        if self.cut:
            return ""
        before, whole = self.decode(self.ids[: self.known]), self.decode(self.ids)
        text, end = self._match(whole[len(before) :])
        return text + end.held

    def _match(self, text: str) -> tuple[str, Stream]:
        if not self.stops:
            return text, self
        held, matched = self.held, self.matched
        for character in text:
            held += character
            matched = tuple(stop.after(m, character) for stop, m in zip(self.stops, matched, strict=True))
            found = max((m for stop, m in zip(self.stops, matched, strict=True) if m == len(stop.text)), default=0)
            if found:
                return held[: len(held) - found], replace(self, held="", cut=True)
        size = len(held) - max(matched)
        return held[:size], replace(self, held=held[size:], matched=matched)


class NoText:
    """The stream of a model without a tokenizer: no text, no stop strings."""

    cut = False

    def feed(self, token: int) -> tuple[str, Any]:
        return "", self

    def rest(self) -> str:
        return ""


def text_after(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Sequence[int], stops: tuple[Stop, ...] = ()
) -> str:
    """All of the text at once; by definition what the stream would have released."""
    stream, said = Stream.after(decode, prompt, stops), ""
    for token in ids:
        text, stream = stream.feed(token)
        said += text
        if stream.cut:
            break
    return said + stream.rest()
