"""The project's one tokenizer: text to ids and back.

Control tokens (end of text, turn markers, masks) that a user types are text, unless the caller says `control=True`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import BadInput
from headwater.text.engine import build, guarded
from headwater.text.pieces import joined, readable, spelling
from headwater.weights.files import atomic

if TYPE_CHECKING:
    from headwater.text.batch import Batch

ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


@dataclass(frozen=True)
class Aligned:
    """Ids with what each came from: kinds (0 first text, 1 second), spans of characters, word numbers (or None)."""

    ids: list[int]
    kinds: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]


class Tokenizer:
    """Built from the contents of a tokenizer.json, the names of its special tokens, and perhaps a chat template."""

    def __init__(
        self,
        spec: dict[str, Any],
        specials: Mapping[str, str] | None = None,
        chat_template: str = "",
        where: object = "tokenizer",
    ):
        self.where, self.chat_template = where, chat_template
        self.engine = build(spec, where)
        self.specials = {role: token for role, token in (specials or {}).items() if self.id_of(token) is not None}
        self._bytes = spelling(spec)

    # ------------------------------------------------------------------------------------------ what it knows

    def __len__(self) -> int:
        """The size of the vocabulary: one more than the largest id."""
        return self._size

    @cached_property
    def _size(self) -> int:
        return max(self.engine.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __repr__(self) -> str:
        return f"Tokenizer({len(self)} pieces, {', '.join(f'{role}={t!r}' for role, t in self.specials.items())})"

    def id_of(self, piece: str) -> int | None:
        found: int | None = self.engine.token_to_id(piece)
        return found

    def special(self, role: str) -> int | None:
        """The id of bos, eos, pad, unk, mask, cls or sep, or None."""
        return self.id_of(self.specials[role]) if role in self.specials else None

    @property
    def bos(self) -> int | None:
        return self.special("bos")

    @property
    def eos(self) -> int | None:
        return self.special("eos")

    @property
    def pad(self) -> int | None:
        return self.special("pad")

    @property
    def mask(self) -> int | None:
        return self.special("mask")

    @cached_property
    def controls(self) -> dict[str, Any]:
        """Control tokens by their text, longest first."""
        found = {t.content: t for t in self.engine.get_added_tokens_decoder().values() if t.special}
        return dict(sorted(found.items(), key=lambda item: -len(item[0])))

    # ------------------------------------------------------------------------------------------ text to ids

    def encode(self, text: str, *, special: bool = True, control: bool = False, breaker: str = "") -> list[int]:
        """Ids of a text. `special` adds what the model expects around it; `control` lets control tokens in it act.

        `breaker` is a character that stands inside control tokens that shall not act (see `broken`); it is taken away.
        """
        if not self._controls_in(text) and not (breaker and breaker in text):
            return list(self._encode(text, special).ids)
        ids = self._obeyed(text, breaker) if control else self._defused(text)
        before, after = self._around if special else ([], [])
        return [*before, *ids, *after]

    def encode_many(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Ids of many texts, on all cores; the same as `encode` of each."""
        plain = [n for n, text in enumerate(texts) if not self._controls_in(text)]
        found = guarded(
            lambda: self.engine.encode_batch_fast([texts[n] for n in plain], add_special_tokens=special),
            self.where,
            BadInput,
        )
        rows = dict(zip(plain, (list(row.ids) for row in found), strict=True))
        return [rows[n] if n in rows else self.encode(text, special=special) for n, text in enumerate(texts)]

    def align(self, text: str | Sequence[str], pair: str | None = None, *, special: bool = True) -> Aligned:
        """Ids with their spans: for tagging words (give a list of words), answering (text, pair) and next-sentence."""
        said = " ".join([*([text] if isinstance(text, str) else text), pair or ""])
        if self._matches_controls and (found := self._controls_in(said)):
            raise BadInput(f"this tokenizer would obey {found[0]!r} in the text; take it out, or use encode")
        whole = self._encode(text, special, pair)
        return Aligned(list(whole.ids), list(whole.type_ids), list(whole.offsets), list(whole.word_ids))

    def batch(self, texts: Sequence[str], *, side: str = "right", special: bool = True) -> Batch:
        """Several texts as one rectangle of ids, and which of them are real."""
        from headwater.text.batch import pad  # torch is only needed here

        fill = self.pad if self.pad is not None else self.eos
        return pad(self.encode_many(texts, special=special), fill or 0, side)

    # ------------------------------------------------------------------------------------------ ids to text

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ids; special tokens are left out unless asked for."""
        self._check(ids)
        text: str = guarded(
            lambda: self.engine.decode(list(ids), skip_special_tokens=not special), self.where, BadInput
        )
        return text

    def piece_bytes(self, token: int) -> bytes:
        """The bytes a token stands for."""
        self._check([token])
        piece = self.engine.id_to_token(token)
        return b"" if piece is None else piece.encode() if piece in self.controls else self._bytes(piece)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The pieces' bytes, end to end: the text without the decoder's tidying."""
        return b"".join(map(self.piece_bytes, ids))

    def piece(self, token: int) -> str:
        """A token as text one can read; a part of a character is shown as \\xNN."""
        return readable(self.piece_bytes(token))

    def pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Tokens for display: (text, how many tokens share it)."""
        return joined([self.piece_bytes(n) for n in ids])

    # ------------------------------------------------------------------------------------------ keeping it

    @property
    def spec(self) -> dict[str, Any]:
        """The contents of its tokenizer.json."""
        made: dict[str, Any] = json.loads(self.engine.to_str())
        return made

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, the public layout."""
        config: dict[str, Any] = {f"{role}_token": token for role, token in self.specials.items()}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.chat_template:
            config["chat_template"] = self.chat_template
        for name, value in (("tokenizer.json", self.spec), ("tokenizer_config.json", config)):
            with atomic(Path(folder) / name) as file:
                file.write(json.dumps(value, ensure_ascii=False, indent=2).encode() + b"\n")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all that decides which ids a text gets."""
        told = json.dumps([self.spec, self.specials, self.chat_template], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()

    # ------------------------------------------------------------------------------------------ within

    def _encode(self, text: str | Sequence[str], special: bool, pair: str | None = None) -> Any:
        def call() -> Any:
            given = text if isinstance(text, str) else list(text)
            return self.engine.encode(
                given, pair, is_pretokenized=not isinstance(text, str), add_special_tokens=special
            )

        return guarded(call, self.where, BadInput)

    def _check(self, ids: Sequence[int]) -> None:
        for n in ids:
            if type(n) is not int or not 0 <= n < len(self):
                raise BadInput(f"token ids must be whole numbers from 0 to {len(self) - 1}, got {n!r}")

    def broken(self, value: Any, breaker: str) -> Any:
        """A text, or plain data with texts in it, with `breaker` after the first character of each control token."""
        if isinstance(value, str):
            while any(len(found) > 1 for found in self._controls_in(value)):  # tokens may overlap: until none is left
                value = self._control.sub(lambda found: found[0][0] + breaker + found[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: self.broken(inner, breaker) for key, inner in value.items()}
        return [self.broken(inner, breaker) for inner in value] if isinstance(value, (list, tuple)) else value

    def _controls_in(self, text: str) -> list[str]:
        return self._control.findall(text) if self.controls else []

    @cached_property
    def _control(self) -> re.Pattern[str]:
        return re.compile("(" + "|".join(map(re.escape, self.controls)) + ")")

    def _obeyed(self, text: str, breaker: str) -> list[int]:
        """The text cut at its control tokens, which become ids; what lies between is encoded as the library would."""
        ids: list[int] = []
        cut = self._control.split(text)
        for n, said in enumerate(cut):
            if n % 2:
                ids.append(self.engine.token_to_id(said) or 0)
                continue
            if n > 0 and self.controls[cut[n - 1]].rstrip:
                said = said.lstrip()
            if n + 1 < len(cut) and self.controls[cut[n + 1]].lstrip:
                said = said.rstrip()
            first, *rest = said.split(breaker) if breaker else [said]
            ids += self._ids(first, self._middle if n > 0 else self.engine)
            ids += [n for part in rest for n in self._ids(part, self._bare)]
        return ids

    def _defused(self, text: str) -> list[int]:
        """The text cut inside each control token, so that no model, whatever its vocabulary, can join it again."""
        breaker = unused(text)
        first, *rest = self.broken(text, breaker).split(breaker)
        return self._ids(first, self.engine) + [n for part in rest for n in self._ids(part, self._bare)]

    def _ids(self, text: str, engine: Any) -> list[int]:
        return (
            guarded(lambda: list(engine.encode(text, add_special_tokens=False).ids), self.where, BadInput)
            if text
            else []
        )

    @cached_property
    def _middle(self) -> Any:
        """For text after a control token: where only the first word of all gets a leading space, this one gets none."""
        return self._variant({"first": "never"})

    @cached_property
    def _bare(self) -> Any:
        """For text in the middle of a word: no leading space of any kind."""
        return self._variant({"first": "never", "always": "never"}, drop=("Prepend",))

    def _variant(self, scheme: Mapping[str, str], drop: tuple[str, ...] = ()) -> Any:
        spec = {**self.spec, "post_processor": None}
        for slot in ("normalizer", "pre_tokenizer"):
            spec[slot] = _changed(spec[slot], scheme, drop)
        return build(spec, self.where)

    @cached_property
    def _matches_controls(self) -> bool:
        """Could the model itself find a control token in plain text? Those that cut by score or by words could."""
        return bool(self.spec["model"]["type"] in ("Unigram", "WordLevel"))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids the model expects before and after a text."""
        bare, full = (list(self._encode("a", special).ids) for special in (False, True))
        at = next(n for n in range(len(full) + 1) if full[n : n + len(bare)] == bare)
        return full[:at], full[at + len(bare) :]


def unused(text: str) -> str:
    """A character that is not in the text: one of the 65,534 for private use at the end of Unicode."""
    used = set(text)
    return next(chr(code) for code in range(0x100000, 0x10FFFE) if chr(code) not in used)


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
