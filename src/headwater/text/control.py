"""Control tokens: where they act, and where they are only words.

A model reads `</s>` as its end. Written by a template it must act; typed by a user it must not, however it is typed: as
it is, in full-width letters that a normalizer straightens, or overlapping another one. So the ids themselves are looked
at: where a control token was found in plain text, the text is cut within it and read again, until none is found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from headwater.errors import BadInput
from headwater.text.engine import build, guarded


class Control:
    """The control tokens of one tokenizer, and how to read text with and without obeying them."""

    def __init__(self, engine: Any, spec: dict[str, Any], where: object):
        self.engine, self.where = engine, where
        self._before_model = {slot: spec.get(slot) for slot in ("normalizer", "pre_tokenizer")}
        found = {t.content: t for t in engine.get_added_tokens_decoder().values() if t.special}
        self.tokens: dict[str, Any] = dict(sorted(found.items(), key=lambda item: -len(item[0])))  # longest first
        self.ids = {engine.token_to_id(token) for token in self.tokens} - {_unknown(spec["model"], engine)}
        self._pattern = re.compile("(" + "|".join(map(re.escape, self.tokens)) + ")") if self.tokens else None

    def found_in(self, text: str) -> list[str]:
        return self._pattern.findall(text) if self._pattern else []

    def plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing acts."""
        ids: list[int] = []
        waiting = [(text, self.engine)]
        while waiting:
            part, engine = waiting.pop()
            found = guarded(lambda e=engine, p=part: e.encode(p, add_special_tokens=False), self.where, BadInput)  # type: ignore[misc]
            if self.ids.isdisjoint(found.ids):
                ids += found.ids
                continue
            acting = [span for n, span in zip(found.ids, found.offsets, strict=True) if n in self.ids]
            cuts = sorted({begin + 1 for begin, end in acting if end - begin > 1})
            if not cuts:  # a control token of a single character can not be cut, and is left out
                ids += [n for n in found.ids if n not in self.ids]
                continue
            bounds = [0, *cuts, len(part)]
            parts = [part[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
            waiting += [(rest, self._bare) for rest in reversed(parts[1:])] + [(parts[0], engine)]
        return ids

    def obeyed(self, text: str, breaker: str = "") -> list[int]:
        """Ids of a text whose control tokens act. `breaker` stands within those that shall not (see `broken`)."""
        ids: list[int] = []
        cut = self._pattern.split(text) if self._pattern else [text]
        for n, said in enumerate(cut):
            if n % 2:
                ids.append(self.engine.token_to_id(said))
                continue
            if n > 0 and self.tokens[cut[n - 1]].rstrip:
                said = said.lstrip()
            if n + 1 < len(cut) and self.tokens[cut[n + 1]].lstrip:
                said = said.rstrip()
            ids += self._between(said.replace(breaker, "") if breaker else said, first=n == 0)
        return ids

    def broken(self, value: Any, breaker: str) -> Any:
        """A text, or plain data with texts in it, with `breaker` after the first character of each control token."""
        if isinstance(value, str):
            while any(len(found) > 1 for found in self.found_in(value)):  # tokens may overlap: until none is left
                assert self._pattern is not None
                value = self._pattern.sub(lambda found: found[0][0] + breaker + found[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: self.broken(inner, breaker) for key, inner in value.items()}
        return [self.broken(inner, breaker) for inner in value] if isinstance(value, (list, tuple)) else value

    def _between(self, text: str, first: bool) -> list[int]:
        return [] if not text else self.plain(text) if first else self._later.plain(text)

    @cached_property
    def _later(self) -> Control:
        """For text after a control token: where only the first word of all gets a leading space, this one gets none."""
        engine = self._variant({"first": "never"})
        return self if engine is self.engine else Control(engine, json.loads(engine.to_str()), self.where)

    @cached_property
    def _bare(self) -> Any:
        """For text in the middle of a word: no leading space of any kind."""
        return self._variant({"first": "never", "always": "never"}, drop=("Prepend",))

    def _variant(self, scheme: Mapping[str, str], drop: tuple[str, ...] = ()) -> Any:
        changed = {slot: _changed(part, scheme, drop) for slot, part in self._before_model.items()}
        if changed == self._before_model:
            return self.engine
        return build({**json.loads(self.engine.to_str()), **changed, "post_processor": None}, self.where)


def unused(text: str) -> str:
    """A character that is not in the text: one of the 65,534 for private use at the end of Unicode."""
    used = set(text)
    return next(chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in used)


def _unknown(model: dict[str, Any], engine: Any) -> int | None:
    """The id that stands for what the model does not know: it comes from plain text, and may."""
    found: int | None = model["unk_id"] if "unk_id" in model else engine.token_to_id(model.get("unk_token") or "")
    return found


def _changed(component: Any, scheme: Mapping[str, str], drop: tuple[str, ...]) -> Any:
    """A normalizer or pre-tokenizer that puts no space in front, where `scheme` and `drop` say so."""
    if component is None or component["type"] in drop:
        return None
    if component["type"] == "Sequence":
        inner = next(key for key in component if key != "type")
        kept = [_changed(part, scheme, drop) for part in component[inner]]
        return {**component, inner: [part for part in kept if part is not None]}
    if component.get("prepend_scheme") in scheme:
        return {**component, "prepend_scheme": scheme[component["prepend_scheme"]]}
    return {**component, "add_prefix_space": False} if drop and "add_prefix_space" in component else component
