"""The most probable text, token by token, many rows at once: what training needs to show samples and to measure."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwater.core.cache import growing


@torch.no_grad()
def greedy(model: Any, source: Tensor, keep: Tensor | None, bos: int, eos: int, most: int) -> list[list[int]]:
    """For each row of source [B, S] the ids it is turned into, without marks. Finished rows leave the batch."""
    memory = model.encode(source, keep=keep)
    cache, rows = growing(model), torch.arange(len(source))
    ids = torch.full((len(source), 1), bos, dtype=torch.long, device=source.device)
    said: list[list[int]] = [[] for _ in range(len(source))]
    for _ in range(most):
        ids = model.decode(ids, memory=memory, cache=cache)[:, -1].argmax(-1, keepdim=True)
        for row, token in zip(rows.tolist(), ids[:, 0].tolist(), strict=True):
            if token != eos:
                said[row].append(token)
        going = (ids[:, 0] != eos).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(ids):
            ids, rows = ids[going], rows[going.cpu()]
            cache.select(going)
            memory = _rows(memory, going)
    return said


def _rows(memory: Any, rows: Tensor) -> Any:
    from dataclasses import fields, replace

    some = {f.name: value[rows] for f in fields(memory) if (value := getattr(memory, f.name)) is not None}
    return replace(memory, **some)
