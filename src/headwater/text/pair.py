"""A translator's tokenizer: it reads one language and writes another, each with its own vocabulary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from headwater.text.tokenizer import Tokenizer
from headwater.weights.files import atomic

TARGET = "tokenizer_target.json"


class PairTokenizer(Tokenizer):
    """Text to ids is the source's, ids to text the target's. Special tokens must have one id in both."""

    def __init__(self, source: Tokenizer, target: Tokenizer):
        self.__dict__.update(source.__dict__)
        self.target = target

    def __repr__(self) -> str:
        return f"PairTokenizer({super().__repr__()}, {self.target!r})"

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self.target.decode(ids, special=special)

    def piece_bytes(self, token: int) -> bytes:
        return self.target.piece_bytes(token)

    def save(self, folder: str | Path, *, token_types: bool = False) -> None:
        super().save(folder, token_types=token_types)
        with atomic(Path(folder) / TARGET) as file:
            file.write(json.dumps(self.target.spec, ensure_ascii=False, indent=2).encode() + b"\n")

    @cached_property
    def hash(self) -> str:
        source = Tokenizer.hash.func(self)  # type: ignore[attr-defined]
        return hashlib.sha256(f"{source} {self.target.hash}".encode()).hexdigest()
