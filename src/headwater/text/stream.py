"""Text as it grows, token by token: only whole characters are said, and nothing is ever taken back."""

from __future__ import annotations

from headwater.text.tokenizer import Tokenizer

HALF = "\N{REPLACEMENT CHARACTER}"  # how a decoder shows a character whose bytes are not all there yet
MOST_WAITING = 16  # a character has at most four tokens; beyond this the bytes are simply not text


class Stream:
    """`put` each id and say what it returns; `end` says what is left.

    The pieces joined are the decoded whole. A piece's text may depend on the one before it (a leading space), so each
    is decoded together with the last tokens already said.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._said: list[int] = []
        self._waiting: list[int] = []

    def put(self, token: int) -> str:
        self._waiting.append(token)
        text = self._new()
        if not text or (text.endswith(HALF) and len(self._waiting) < MOST_WAITING):
            return ""
        return self._say(text)

    def end(self) -> str:
        return self._say(self._new())

    def _new(self) -> str:
        before = self._tokenizer.decode(self._said)
        return self._tokenizer.decode(self._said + self._waiting)[len(before) :]

    def _say(self, text: str) -> str:
        self._said, self._waiting = self._waiting or self._said, []
        return text
