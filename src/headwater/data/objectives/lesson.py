"""A lesson: what a model is given, and what it must say. The same form for every objective."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headwater.errors import BadSetting
from headwater.text.tokenizer import Tokenizer

IGNORE = -100  # a target that is not counted
TARGET_FIELDS = ("targets", "second")


@dataclass(frozen=True)
class Lesson:
    """Arrays for one forward pass; those an objective does not use are None.

    ids [B, Q] and keep [B, Q] (True: a real token) go to the model, source [B, S] and source_keep to its encoder.
    targets are [B, Q] ids, [B] classes or [B, 2] first and last place; IGNORE is not counted.
    """

    ids: np.ndarray
    keep: np.ndarray
    targets: np.ndarray
    source: np.ndarray | None = None
    source_keep: np.ndarray | None = None
    kinds: np.ndarray | None = None  # [B, Q] 0 first text, 1 second
    documents: np.ndarray | None = None  # [B, Q] packed documents, 0 is padding
    second: np.ndarray | None = None  # [B] targets of a second head: does the next sentence follow (0) or not (1)

    @property
    def counted(self) -> int:
        """Targets that count: what a summed loss is divided by."""
        return int((self.targets != IGNORE).sum())


@dataclass(frozen=True)
class Marks:
    """The ids of the special tokens an objective may need."""

    pad: int
    bos: int
    eos: int
    mask: int = -1
    vocab: int = 0
    special: tuple[int, ...] = ()  # ids that are no text: never hidden, never drawn at random
    sentinels: tuple[int, ...] = ()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Marks:
        """As a tokenizer has them; one without bos or pad lends its eos, as the public models do."""
        has = {role: tokenizer.special(role) for role in ("pad", "bos", "eos", "mask", "cls", "sep")}
        eos = _first(has["eos"], has["sep"])
        if eos is None:
            raise BadSetting("this tokenizer has no end token, so no text ever ends; choose one that names eos or sep")
        pad, bos, mask = _first(has["pad"], eos), _first(has["bos"], has["cls"], eos), _first(has["mask"], -1)
        names = [tokenizer.id_of(f"<extra_id_{n}>") for n in range(100)]
        sentinels = tuple(number for number in names if number is not None)
        special = tuple(sorted({tokenizer.id_of(text) or 0 for text in tokenizer.controls}))
        return cls(pad or 0, bos or 0, eos, -1 if mask is None else mask, len(tokenizer), special, sentinels)


def _first(*ids: int | None) -> int | None:
    return next((n for n in ids if n is not None), None)
