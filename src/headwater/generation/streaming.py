"""Incremental detokenization and stop strings: text is released once it can no longer change.

A token may be part of a character, and its text may depend on the token before it; so text is always decoded together
with the last tokens that released some. Stop strings are matched character by character (Knuth, Morris, Pratt), however
the tokens split them: the text ends before the stop string that is complete first (of several that end together, the
longest). All states are values: push() gives the text that is now certain and the next state, so that an interrupted
step changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from headwater.i18n import _
from headwater.parts import must

MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1000  # characters
PROMPT_CONTEXT = 8  # last tokens of the prompt that the first output tokens are decoded with
REPLACEMENT = "\ufffd"  # what a decoder writes for an incomplete character


@dataclass(frozen=True)
class StopString:
    """One stop string, matched incrementally (Knuth-Morris-Pratt)."""

    text: str

    @cached_property
    def failure_table(self) -> list[int]:
        """For each prefix of the text, the length of its longest proper prefix that is also its suffix."""
        table = [0]
        size = 0
        for character in self.text[1:]:
            while size and self.text[size] != character:
                size = table[size - 1]
            size += self.text[size] == character
            table.append(size)
        return table

    def advance(self, matched: int, character: str) -> int:
        """The number of matched characters after one more character of the text."""
        if matched == len(self.text):
            matched = self.failure_table[-1]
        while matched and self.text[matched] != character:
            matched = self.failure_table[matched - 1]
        return matched + (self.text[matched] == character)


def build_stop_strings(texts: str | Sequence[str]) -> tuple[StopString, ...]:
    """Validated stop strings, each once."""
    texts = (texts,) if isinstance(texts, str) else tuple(texts)
    must(
        len(texts) <= MAX_STOP_STRINGS,
        "generate",
        _("stop must be at most {limit} strings", limit=MAX_STOP_STRINGS),
        len(texts),
        _("use fewer, or stop by yourself while streaming"),
    )
    for text in texts:
        must(
            isinstance(text, str) and 1 <= len(text) <= MAX_STOP_LENGTH,
            "generate",
            _("a stop string must have 1 to {limit} characters", limit=MAX_STOP_LENGTH),
            len(text) if isinstance(text, str) else text,
            _("shorten it or leave it out"),
        )
    return tuple(map(StopString, dict.fromkeys(texts)))


@dataclass(frozen=True)
class TextStream:
    """Incremental detokenizer with stop strings, as an immutable state.

    ids: the last tokens that released text (num_decoded of them), and those since. pending: text held back because it
    may become a stop string. matched: characters matched of each stop string.
    """

    decode: Callable[[Sequence[int]], str]
    stop_strings: tuple[StopString, ...] = ()
    ids: tuple[int, ...] = ()
    num_decoded: int = 0
    pending: str = ""
    matched: tuple[int, ...] = field(default=())
    stop_found: bool = False

    @classmethod
    def after_prompt(
        cls, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop_strings: tuple[StopString, ...] = ()
    ) -> TextStream:
        """The stream of the output after a prompt, whose last tokens may decide whether a word begins with a space."""
        context = tuple(prompt[-PROMPT_CONTEXT:])
        return cls(decode, stop_strings, context, len(context), matched=(0,) * len(stop_strings))

    def push(self, token: int) -> tuple[str, TextStream]:
        """The text that is now certain, and the stream after the token."""
        ids = (*self.ids, token)
        released = self.decode(ids[: self.num_decoded])
        text = self.decode(ids)
        if text.endswith(REPLACEMENT) or len(text) <= len(released):
            return "", replace(self, ids=ids)
        decoded = replace(self, ids=ids[self.num_decoded :], num_decoded=len(ids) - self.num_decoded)
        return decoded._match(text[len(released) :])

    def flush(self) -> str:
        """The text held back so far, when no token will follow."""
        if self.stop_found:
            return ""
        released = self.decode(self.ids[: self.num_decoded])
        text, last_state = self._match(self.decode(self.ids)[len(released) :])
        return text + last_state.pending

    def _match(self, text: str) -> tuple[str, TextStream]:
        """Match the stop strings; the text that can be part of none, and the stream after it."""
        if not self.stop_strings:
            return text, self
        pending = self.pending
        matched = self.matched
        for character in text:
            pending += character
            matched = tuple(stop.advance(m, character) for stop, m in zip(self.stop_strings, matched, strict=True))
            complete = [m for stop, m in zip(self.stop_strings, matched, strict=True) if m == len(stop.text)]
            if complete:
                return pending[: len(pending) - max(complete)], replace(self, pending="", stop_found=True)
        size = len(pending) - max(matched)
        return pending[:size], replace(self, pending=pending[size:], matched=matched)


class NoTextStream:
    """The stream of a model without a tokenizer: no text, no stop strings."""

    stop_found = False

    def push(self, token: int) -> tuple[str, NoTextStream]:
        return "", self

    def flush(self) -> str:
        return ""
