"""Texts to vectors with a sentence encoder: the mean of the real tokens' states, at length one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headwater.core import Mean
from headwater.errors import BadInput
from headwater.families.folder import Loaded


def embed(loaded: Loaded, texts: Sequence[str], batch: int = 32) -> Tensor:
    """[len(texts), D] unit vectors; their product is the cosine. Texts are worked off by length, answered in order."""
    if loaded.tokenizer is None or loaded.model.encoder is None or loaded.model.decoder is not None:
        raise BadInput("embed: it needs an encoder with a tokenizer, got another kind of model; try minilm")
    out = torch.zeros(len(texts), loaded.model.encoder.spec.d_model)
    with torch.inference_mode():
        for rows in _by_length(texts, batch):
            given = loaded.tokenizer.batch([texts[i] for i in rows])
            rows_of = loaded.model.rows(given.ids, given.keep, None, None, None)
            out[rows] = F.normalize(Mean().pick(loaded.model.states(rows_of), rows_of), dim=-1)
    return out


def _by_length(texts: Sequence[str], batch: int) -> Iterator[list[int]]:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]
