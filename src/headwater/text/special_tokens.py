"""Encode text with special tokens parsed, or with special tokens in user text escaped so that they stay text.

A special token such as `</s>` in a chat template must be parsed; the same characters typed by a user must stay text,
in every form: typed literally, in full-width letters that a normalizer maps to it, or overlapping another one. So the
ids are checked: where a special token was encoded from plain text, the text is split within it and encoded again,
until there is none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import tokenizers

from headwater.errors import BadInput
from headwater.text.backend import build_backend, call_backend


class SpecialTokenizer:
    """The special tokens of a tokenizer; encodes text with special tokens parsed or escaped."""

    def __init__(self, backend: tokenizers.Tokenizer, spec: dict[str, Any], where: object):
        self.backend = backend
        self.where = where
        self._pre_model_components = {slot: spec.get(slot) for slot in ("normalizer", "pre_tokenizer")}
        tokens = {t.content: t for t in backend.get_added_tokens_decoder().values() if t.special}
        self.tokens: dict[str, tokenizers.AddedToken] = dict(
            sorted(tokens.items(), key=lambda item: -len(item[0]))
        )  # longest first
        self.ids = {backend.token_to_id(token) for token in self.tokens} - {_unknown_id(spec["model"], backend)}
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.tokens)) + ")") if self.tokens else None

    def find_specials(self, text: str) -> list[str]:
        """The special tokens that occur in a text."""
        return self._pattern.findall(text) if self._pattern else []

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text without special tokens: those typed in it are encoded as text."""
        ids: list[int] = []
        stack = [(text, self.backend)]
        while stack:
            part, backend = stack.pop()
            encoding = call_backend(
                lambda b=backend, p=part: b.encode(p, add_special_tokens=False),  # type: ignore[misc]
                self.where,
                BadInput,
            )
            if self.ids.isdisjoint(encoding.ids):
                ids += encoding.ids
                continue

            # split within each special token, after its first character
            spans = [span for n, span in zip(encoding.ids, encoding.offsets, strict=True) if n in self.ids]
            boundaries = sorted({start + 1 for start, end in spans if end - start > 1})
            if not boundaries:  # a special token of a single character cannot be split, and is dropped
                ids += [n for n in encoding.ids if n not in self.ids]
                continue
            bounds = [0, *boundaries, len(part)]
            parts = [part[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            stack += [(rest, self._mid_word_backend) for rest in reversed(parts[1:])]
            stack.append((parts[0], backend))
        return ids

    def encode_with_specials(self, text: str, escape_char: str = "") -> list[int]:
        """Ids of a text with special tokens parsed, except those escaped with escape_char (see escape_specials)."""
        ids: list[int] = []
        segments = self._pattern.split(text) if self._pattern else [text]  # text, special token, text, …
        for n, segment in enumerate(segments):
            if n % 2:
                token_id = self.backend.token_to_id(segment)
                assert token_id is not None, "special tokens are in the vocabulary"
                ids.append(token_id)
                continue
            if n > 0 and self.tokens[segments[n - 1]].rstrip:
                segment = segment.lstrip()
            if n + 1 < len(segments) and self.tokens[segments[n + 1]].lstrip:
                segment = segment.rstrip()
            if escape_char:
                segment = segment.replace(escape_char, "")
            ids += self._encode_segment(segment, first=n == 0)
        return ids

    def escape_specials(self, value: Any, escape_char: str) -> Any:
        """A text, or JSON data with texts in it, with escape_char after the first character of each special token."""
        if isinstance(value, str):
            while any(len(token) > 1 for token in self.find_specials(value)):  # tokens may overlap: until none is left
                assert self._pattern is not None
                value = self._pattern.sub(lambda match: match[0][0] + escape_char + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: self.escape_specials(inner, escape_char) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape_specials(inner, escape_char) for inner in value]
        return value

    def _encode_segment(self, text: str, first: bool) -> list[int]:
        if not text:
            return []
        return self.encode_text(text) if first else self._after_special.encode_text(text)

    @cached_property
    def _after_special(self) -> SpecialTokenizer:
        """For text after a special token: no leading space, where only the first word of a text gets one."""
        backend = self._variant_backend({"first": "never"})
        if backend is self.backend:
            return self
        return SpecialTokenizer(backend, json.loads(backend.to_str()), self.where)

    @cached_property
    def _mid_word_backend(self) -> tokenizers.Tokenizer:
        """For text in the middle of a word: no leading space of any kind."""
        return self._variant_backend({"first": "never", "always": "never"}, drop=("Prepend",))

    def _variant_backend(self, prepend_schemes: Mapping[str, str], drop: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
        components = {
            slot: _without_prefix_space(part, prepend_schemes, drop)
            for slot, part in self._pre_model_components.items()
        }
        if components == self._pre_model_components:
            return self.backend
        return build_backend({**json.loads(self.backend.to_str()), **components, "post_processor": None}, self.where)


def unused_character(text: str) -> str:
    """A character that is not in the text: one of the 65,534 for private use at the end of Unicode."""
    used = set(text)
    return next(chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in used)


def _unknown_id(model: dict[str, Any], backend: tokenizers.Tokenizer) -> int | None:
    """The id of the unknown token, which plain text may contain."""
    unk_id: int | None = model["unk_id"] if "unk_id" in model else backend.token_to_id(model.get("unk_token") or "")
    return unk_id


def _without_prefix_space(component: Any, prepend_schemes: Mapping[str, str], drop: tuple[str, ...]) -> Any:
    """A normalizer or pre-tokenizer without leading space: prepend schemes replaced, components of `drop` removed."""
    if component is None or component["type"] in drop:
        return None
    if component["type"] == "Sequence":
        inner = next(key for key in component if key != "type")
        parts = [_without_prefix_space(part, prepend_schemes, drop) for part in component[inner]]
        return {**component, inner: [part for part in parts if part is not None]}
    if component.get("prepend_scheme") in prepend_schemes:
        return {**component, "prepend_scheme": prepend_schemes[component["prepend_scheme"]]}
    return {**component, "add_prefix_space": False} if drop and "add_prefix_space" in component else component
