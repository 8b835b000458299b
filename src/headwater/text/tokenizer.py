"""Tokenizer: text to token ids and back. Special tokens typed by a user are plain text unless parse_special=True."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.io.files import atomic_write
from headwater.text.backend import build_backend, call_backend
from headwater.text.pieces import merge_partial_characters, piece_decoder, readable_text
from headwater.text.special_tokens import SpecialTokenizer

SPECIAL_TOKEN_ROLES = ("bos", "eos", "pad", "unk", "mask", "cls", "sep")


@dataclass(frozen=True)
class Encoding:
    """Token ids with token types (0 first text, 1 second), character offsets and word indices (or None)."""

    ids: list[int]
    token_types: list[int]
    offsets: list[tuple[int, int]]
    word_ids: list[int | None]


class Tokenizer:
    """A tokenizer from the contents of a tokenizer.json, its special tokens by role, and a chat template."""

    def __init__(
        self,
        spec: dict[str, Any],
        special_tokens_map: Mapping[str, str] | None = None,
        chat_template: str = "",
        where: object = "tokenizer",
    ):
        self.where = where
        self.chat_template = chat_template
        self.backend = build_backend(spec, where)
        self.special_tokens_map = {
            role: token for role, token in (special_tokens_map or {}).items() if self.token_to_id(token) is not None
        }
        self._piece_to_bytes = piece_decoder(spec)
        self.special_tokenizer = SpecialTokenizer(self.backend, spec, where)

    # --------------------------------------------------------------------------------- vocabulary, special tokens

    def __len__(self) -> int:
        """The size of the vocabulary: one more than the largest id."""
        return self._size

    @cached_property
    def _size(self) -> int:
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def __repr__(self) -> str:
        special_tokens = ", ".join(f"{role}={token!r}" for role, token in self.special_tokens_map.items())
        return f"Tokenizer({len(self)} pieces, {special_tokens})"

    def token_to_id(self, piece: str) -> int | None:
        """The id of a token, or None."""
        token_id: int | None = self.backend.token_to_id(piece)
        return token_id

    def special_id(self, role: str) -> int | None:
        """The id of bos, eos, pad, unk, mask, cls or sep, or None."""
        return self.token_to_id(self.special_tokens_map[role]) if role in self.special_tokens_map else None

    @property
    def bos_id(self) -> int | None:
        return self.special_id("bos")

    @property
    def eos_id(self) -> int | None:
        return self.special_id("eos")

    @property
    def pad_id(self) -> int | None:
        return self.special_id("pad")

    @property
    def mask_id(self) -> int | None:
        return self.special_id("mask")

    @property
    def special_tokens(self) -> dict[str, tokenizers.AddedToken]:
        """Special tokens by their text, longest first."""
        return self.special_tokenizer.tokens

    # ------------------------------------------------------------------------------------------ text to ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False, escape_char: str = ""
    ) -> list[int]:
        """Token ids of a text.

        add_special_tokens: add the tokens the model expects around a text, such as <bos> and <eos>.
        parse_special: parse special tokens in the text; those escaped with escape_char stay text, without it.
        """
        if parse_special:
            ids = self.special_tokenizer.encode_with_specials(text, escape_char)
        else:
            ids = self.special_tokenizer.encode_text(text)
        before, after = self._special_affixes if add_special_tokens else ([], [])
        return [*before, *ids, *after]

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts, on all cores; the same as `encode` of each."""
        backend = self.backend
        before, after = self._special_affixes if add_special_tokens else ([], [])
        encodings = call_backend(
            lambda: backend.encode_batch_fast(list(texts), add_special_tokens=False), self.where, BadInput
        )
        rows = (
            row.ids if self.special_tokenizer.ids.isdisjoint(row.ids) else self.special_tokenizer.encode_text(text)
            for row, text in zip(encodings, texts, strict=True)
        )
        return [[*before, *row, *after] for row in rows]

    def encode_with_offsets(
        self, text: str | Sequence[str], text_pair: str | None = None, *, add_special_tokens: bool = True
    ) -> Encoding:
        """Token ids with offsets, of a text, a pair of texts, or a list of words (for token classification)."""
        encoding = self._encode_with_backend(text, add_special_tokens, text_pair)
        text_ids = [
            n for n, is_special in zip(encoding.ids, encoding.special_tokens_mask, strict=True) if not is_special
        ]
        if special_ids := [n for n in text_ids if n in self.special_tokenizer.ids]:
            raise BadInput(
                _(
                    "the text contains the special token {token!r}; remove it, or use encode",
                    token=self.backend.id_to_token(special_ids[0]),
                )
            )
        return Encoding(list(encoding.ids), list(encoding.type_ids), list(encoding.offsets), list(encoding.word_ids))

    def encode_padded(
        self, texts: Sequence[str], *, padding_side: str = "right", add_special_tokens: bool = True
    ) -> BatchEncoding:
        """Token ids of several texts, padded to a batch, with the attention mask."""
        pad_id = self.pad_id if self.pad_id is not None else self.eos_id
        rows = self.encode_batch(texts, add_special_tokens=add_special_tokens)
        return pad_sequences(rows, pad_id or 0, padding_side)

    # ------------------------------------------------------------------------------------------ ids to text

    def decode(self, ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """Text of token ids; special tokens are skipped unless keep_special_tokens."""
        self._check_ids(ids)
        text: str = call_backend(
            lambda: self.backend.decode(list(ids), skip_special_tokens=not keep_special_tokens), self.where, BadInput
        )
        return text

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        self._check_ids([token_id])
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if piece in self.special_tokenizer.tokens:
            return bytes(piece.encode())
        return self._piece_to_bytes(piece)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes of the tokens, joined: the text without the cleanup of the decoder."""
        return b"".join(map(self.piece_bytes, ids))

    def piece(self, token_id: int) -> str:
        """A token as readable text; a part of a character is shown as \\xNN."""
        return readable_text(self.piece_bytes(token_id))

    def display_pieces(self, ids: Sequence[int]) -> list[tuple[str, int]]:
        """Tokens for display: (text, number of tokens that share it)."""
        return merge_partial_characters([self.piece_bytes(n) for n in ids])

    # ------------------------------------------------------------------------------------------------ saving

    @property
    def spec(self) -> dict[str, Any]:
        """The contents of its tokenizer.json."""
        spec: dict[str, Any] = json.loads(self.backend.to_str())
        return spec

    def save(self, folder: str | Path, *, token_types: bool = False) -> None:
        """Write tokenizer.json and tokenizer_config.json, the public layout.

        token_types: make the tokenizer of transformers return token_type_ids, for a model that takes them.
        """
        config: dict[str, Any] = {f"{role}_token": token for role, token in self.special_tokens_map.items()}
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if token_types:
            config["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        if self.chat_template:
            config["chat_template"] = self.chat_template
        for name, value in (("tokenizer.json", self.spec), ("tokenizer_config.json", config)):
            with atomic_write(Path(folder) / name) as file:
                file.write(json.dumps(value, ensure_ascii=False, indent=2).encode() + b"\n")

    @cached_property
    def hash(self) -> str:
        """SHA-256 of everything that determines the ids of a text."""
        content = json.dumps([self.spec, self.special_tokens_map, self.chat_template], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    # ----------------------------------------------------------------------------------------------- private

    def _encode_with_backend(
        self, text: str | Sequence[str], add_special_tokens: bool, text_pair: str | None = None
    ) -> tokenizers.Encoding:
        """The encoding of a text or a list of words, as the library returns it."""

        def call() -> tokenizers.Encoding:
            is_pretokenized = not isinstance(text, str)
            return self.backend.encode(
                list(text) if is_pretokenized else text,
                text_pair,
                is_pretokenized=is_pretokenized,
                add_special_tokens=add_special_tokens,
            )

        return call_backend(call, self.where, BadInput)

    def _check_ids(self, ids: Sequence[int]) -> None:
        for n in ids:
            if type(n) is not int or not 0 <= n < len(self):
                raise BadInput(
                    _(
                        "token ids must be integers from 0 to {max_id}, got {token_id!r}",
                        max_id=len(self) - 1,
                        token_id=n,
                    )
                )

    @cached_property
    def _special_affixes(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        encoding = self._encode_with_backend("a", True)
        positions = [n for n, is_special in enumerate(encoding.special_tokens_mask) if not is_special]
        positions = positions or [len(encoding.ids)]
        return list(encoding.ids[: positions[0]]), list(encoding.ids[positions[-1] + 1 :])


# ------------------------------------------------------------------------------------- source and target vocabularies

TARGET_TOKENIZER_FILE = "tokenizer_target.json"


class PairTokenizer(Tokenizer):
    """A translation model's pair of tokenizers: encodes with the source's, decodes with the target's.

    Special tokens must have the same ids in both.
    """

    def __init__(self, source: Tokenizer, target: Tokenizer):
        self.__dict__.update(source.__dict__)
        self.target = target

    def __repr__(self) -> str:
        return f"PairTokenizer({super().__repr__()}, {self.target!r})"

    def decode(self, ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        return self.target.decode(ids, keep_special_tokens=keep_special_tokens)

    def piece_bytes(self, token_id: int) -> bytes:
        return self.target.piece_bytes(token_id)

    def save(self, folder: str | Path, *, token_types: bool = False) -> None:
        super().save(folder, token_types=token_types)
        with atomic_write(Path(folder) / TARGET_TOKENIZER_FILE) as file:
            file.write(json.dumps(self.target.spec, ensure_ascii=False, indent=2).encode() + b"\n")

    @cached_property
    def hash(self) -> str:
        source = Tokenizer.hash.func(self)  # type: ignore[attr-defined]
        return hashlib.sha256(f"{source} {self.target.hash}".encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# Pad rows of token ids into a batch: ids and attention mask as tensors.


class BatchEncoding(NamedTuple):
    """A padded batch: ids [B, Q] and attention_mask [B, Q], True where there is a token."""

    ids: Tensor
    attention_mask: Tensor


def pad_sequences(rows: Sequence[Sequence[int]], pad_id: int, padding_side: str = "right") -> BatchEncoding:
    """Pad rows of ids to the longest.

    >>> pad_sequences([[1, 2], [3]], pad_id=0, padding_side="left").ids.tolist()
    [[1, 2], [0, 3]]
    """
    if padding_side not in ("left", "right"):
        raise BadInput(_("padding_side must be left or right, got {padding_side!r}", padding_side=padding_side))
    width = max(map(len, rows), default=0)
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for n, row in enumerate(rows):
        columns = slice(width - len(row), width) if padding_side == "left" else slice(0, len(row))
        ids[n, columns] = torch.tensor(row, dtype=torch.long)
        attention_mask[n, columns] = True
    return BatchEncoding(ids, attention_mask)
