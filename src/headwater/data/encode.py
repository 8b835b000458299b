"""Texts to rows of ids, many at a time, in a type as small as the vocabulary allows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice

import numpy as np

from headwater.data.ragged import Ragged, smallest_type
from headwater.text.tokenizer import Tokenizer

TOGETHER = 4096  # texts handed to the library at once


def encode_rows(tokenizer: Tokenizer, texts: Iterable[str], special: bool = False) -> Ragged:
    """One row of ids for each text."""
    dtype = smallest_type(len(tokenizer))
    rows: list[np.ndarray] = [np.zeros(0, dtype)]
    lengths = [0]
    for group in _groups(texts):
        found = tokenizer.encode_many(group, special=special)
        lengths += [len(row) for row in found]
        rows.append(np.fromiter(chain.from_iterable(found), dtype))
    return Ragged(np.concatenate(rows), np.cumsum(lengths))


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    waiting = iter(texts)
    while group := list(islice(waiting, TOGETHER)):
        yield group
