"""The project's one tokenizer: text to ids and back.

Control tokens (end of text, turn markers, masks) that a user types are text, unless the caller says `control=True`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.errors import BadInput
from headwater.text.control import Control
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
        self.control = Control(self.engine, spec, where)

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

    @property
    def controls(self) -> dict[str, Any]:
        """Control tokens by their text, longest first."""
        return self.control.tokens

    # ------------------------------------------------------------------------------------------ text to ids

    def encode(self, text: str, *, special: bool = True, control: bool = False, breaker: str = "") -> list[int]:
        """Ids of a text. `special` adds what the model expects around it; `control` lets control tokens in it act.

        `breaker` is a character put inside control tokens that shall not act (control.py); it is taken away.
        """
        ids = self.control.obeyed(text, breaker) if control else self.control.plain(text)
        before, after = self._around if special else ([], [])
        return [*before, *ids, *after]

    def encode_many(self, texts: Sequence[str], *, special: bool = True) -> list[list[int]]:
        """Ids of many texts, on all cores; the same as `encode` of each."""
        engine = self.engine
        before, after = self._around if special else ([], [])
        found = guarded(lambda: engine.encode_batch_fast(list(texts), add_special_tokens=False), self.where, BadInput)
        rows = (
            row.ids if self.control.ids.isdisjoint(row.ids) else self.control.plain(text)
            for row, text in zip(found, texts, strict=True)
        )
        return [[*before, *row, *after] for row in rows]

    def align(self, text: str | Sequence[str], pair: str | None = None, *, special: bool = True) -> Aligned:
        """Ids with their spans: for tagging words (give a list of words), answering (text, pair) and next-sentence."""
        whole = self._encode(text, special, pair)
        acting = [n for n, outside in zip(whole.ids, whole.special_tokens_mask, strict=True) if not outside]
        if acting := [n for n in acting if n in self.control.ids]:
            raise BadInput(
                f"the text holds {self.engine.id_to_token(acting[0])!r}, which would act; take it out, or use encode"
            )
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
        return b"" if piece is None else piece.encode() if piece in self.control.tokens else self._bytes(piece)

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

    def save(self, folder: str | Path, *, token_types: bool = False) -> None:
        """Write tokenizer.json and tokenizer_config.json, the public layout.

        token_types: transformers' tokenizer shall tell which of two texts a token belongs to, for a model that asks.
        """
        config: dict[str, Any] = {f"{role}_token": token for role, token in self.specials.items()}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if token_types:
            config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
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

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids the model expects before and after a text."""
        whole = self._encode("a", True)
        text = [n for n, outside in enumerate(whole.special_tokens_mask) if not outside] or [len(whole.ids)]
        return list(whole.ids[: text[0]]), list(whole.ids[text[-1] + 1 :])
