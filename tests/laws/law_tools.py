"""What the laws use: how a law is listed, texts and padding to try it on, and what counts as the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from combinations import VOCAB, Case
from torch import Tensor

LAWS: dict[str, Callable[[Case], None]] = {}
APPLIES: dict[str, Callable[[Case], bool]] = {}


def law(where: Callable[[Case], bool] = lambda case: True) -> Callable:
    def listed(check: Callable[[Case], None]) -> Callable[[Case], None]:
        LAWS[check.__name__], APPLIES[check.__name__] = check, where
        return check

    return listed


# ------------------------------------------------------------------------------------------------------ what laws use

LENGTHS = (6, 4, 1)  # three rows of unequal length
SOURCES = (5, 2, 7)


def ids(length: int, rows: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def texts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    """One row [1, length] each."""
    return [ids(length, seed=seed + n) for n, length in enumerate(lengths)]


def padded(rows: list[Tensor], side: str, extra: int = 1) -> tuple[Tensor, Tensor]:
    """All rows as one batch and which tokens are real; the padding is made of real-looking ids."""
    width = max(row.shape[1] for row in rows) + extra
    batch, keep = ids(width, len(rows), seed=99), torch.zeros(len(rows), width, dtype=torch.bool)
    for n, row in enumerate(rows):
        there = torch.arange(row.shape[1])
        if side == "left":
            there = there + width - row.shape[1]
        if side == "holes":
            there = torch.randperm(width, generator=torch.Generator().manual_seed(n))[: row.shape[1]].sort().values
        batch[n, there], keep[n, there] = row[0], True
    return batch, keep


def same(got: Tensor, want: Tensor, what: str = "", limit: float = 1e-9) -> None:
    """Equal to 1e-9 of the larger of one and the size of the numbers; NaN equals nothing."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    worst, size = ((got - want).abs().max().item(), want.abs().max().item()) if got.numel() else (0.0, 0.0)
    assert worst <= limit * max(1.0, size), f"{what}: differs by {worst:.1e}"


def sources(case: Case) -> list[Tensor | None]:
    return list(texts(SOURCES, seed=50)) if case.both else [None] * len(SOURCES)


def alone(case: Case) -> list[Tensor]:
    """What each text gives by itself, [1, Q, vocab]."""
    with torch.no_grad():
        return [case.model()(text, source=source) for text, source in zip(texts(), sources(case), strict=True)]


def batch_of_sources(case: Case, side: str) -> dict[str, Tensor]:
    if not case.both:
        return {}
    batch, keep = padded(texts(SOURCES, seed=50), side)
    return {"source": batch, "source_attention_mask": keep}


def grads(model: torch.nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def pull(out: Tensor) -> Tensor:
    """A loss that weighs every output differently, so that no two errors cancel."""
    return (out * torch.sin(torch.arange(out.numel(), dtype=out.dtype).view(out.shape))).sum()
