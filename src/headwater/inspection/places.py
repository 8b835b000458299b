"""Positions drawn: what each position module of a model does, asked of the module itself and not of its name.

A position may add to the embedding, turn queries and keys, bias the scores, or score against the query. Each is asked
all four, and what answers is shown:

    added     table [P, D]: what is added at each place; similarity [P, P]: the cosine between the rows
    turned    table [P, D/2]: cos(place · speed) of each pair; curves: mean cos(distance · speed), the score of equal
              vectors so far apart
    biased    curves [H, 2P - 1]: what is added to a score, by distance (key - query); scored: the part of it that is
              there whatever the query (Transformer-XL)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from headwater.core.attention import AttentionLayer, CrossAttentionLayer
from headwater.core.positions import Position
from headwater.errors import BadSetting
from headwater.inspection.results import Result
from headwater.inspection.subjects import Subject, still


def _none() -> np.ndarray:
    return np.zeros((0, 0), np.float32)


@dataclass(frozen=True, eq=False)
class Drawn(Result):
    """One position. where: its path. acts: added, turned, biased or scored. table, similarity and curves as above, or
    empty. offsets: the distances (key - query) of the curves.
    """

    where: str
    part: str
    acts: str
    table: np.ndarray = field(default_factory=_none)
    similarity: np.ndarray = field(default_factory=_none)
    offsets: np.ndarray = field(default_factory=_none)
    curves: np.ndarray = field(default_factory=_none)

    def lines(self) -> list[str]:
        sizes = (
            f"{self.table.shape[0]} places × {self.table.shape[1]}" if self.table.size else f"{len(self.curves)} heads"
        )
        return [f"{self.where}: {self.part}, {self.acts}; {sizes}"]


@dataclass(frozen=True, eq=False)
class Positions(Result):
    drawn: tuple[Drawn, ...]

    def lines(self) -> list[str]:
        return [line for one in self.drawn for line in one.lines()] or ["this model has no positions"]


def positions(model: Any, length: int = 64) -> Positions:
    """Every position of a model that does something, over `length` places (or as many as a learned table has)."""
    if length < 2:
        raise BadSetting(f"positions: length must be at least 2, got {length}; 64 is usual")
    inner = Subject.of(model).model
    made: list[Drawn] = []
    with still(inner):
        for side in ("encoder", "decoder"):
            stack = getattr(inner, side)
            if stack is None:
                continue
            if isinstance(getattr(stack.embed, "position", None), Position):
                made += _added(f"{side}.embed.position", stack, length)
            for n, position in enumerate(stack.positions):
                made += _acting(f"{side}.positions.{n}", position, _user(stack, n), length)
    return Positions(tuple(made))


def _user(stack: Any, number: int) -> AttentionLayer | None:
    """The first attention that uses a position."""
    every = (m for layer in stack.layers for m in layer.modules() if isinstance(m, AttentionLayer))
    return next((m for m in every if not isinstance(m, CrossAttentionLayer) and stack.lanes[m.lane][1] == number), None)


def _added(where: str, stack: Any, length: int) -> list[Drawn]:
    position, width = stack.embed.position, stack.embed.tokens.embedding_dim
    table = getattr(position, "table", None)
    if table is not None:
        length = min(length, table.num_embeddings - position.first)
    rows = position.add(torch.zeros(1, length, width), torch.arange(length)[None])[0]
    if not rows.any():
        return []
    unit = rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-9)
    return [Drawn(where, type(stack.spec.embed.position).__name__, "added", rows.numpy(), (unit @ unit.T).numpy())]


def _acting(where: str, position: Any, user: AttentionLayer | None, length: int) -> list[Drawn]:
    if user is None:
        return []
    part, places = type(user.spec.position).__name__, torch.arange(length)[None]
    q_places, k_places = torch.full((1, 1), length - 1), torch.arange(2 * length - 1)[None]
    offsets = (k_places - q_places)[0].numpy()
    made = []
    if (bias := position.bias(q_places, k_places)) is not None:
        made.append(Drawn(where, part, "biased", offsets=offsets, curves=bias[0, :, 0].float().numpy()))
    angles = position.angles(places, torch.float32)
    ones = torch.ones(1, 1, length, user.head_dim)
    if angles is not None:
        q, k = position.turn(ones, ones, angles)
        near = (q[0, 0, :1] @ k[0, 0].T) / user.head_dim
        cos = angles[0][0, 0].float().numpy()
        made.append(Drawn(where, part, "turned", cos, offsets=np.arange(length), curves=near.numpy()))
    nothing = torch.zeros(1, user.heads, 1, user.head_dim)
    if angles is None:
        nothing, _ = position.turn(nothing, nothing, None)
        if (score := position.score(nothing, q_places, k_places)) is not None:
            curves = score[0, :, 0].float().numpy() * user.kernel.scale
            made.append(Drawn(where, part, "scored", offsets=offsets, curves=curves))
    return made
