"""Drawing a token so that the same seed gives the same text: alone, in a batch, streamed, speculated, after an
interruption.

Every token of the vocabulary gets its own noise, a function of (seed, step, token) and of nothing else; the token
with the greatest score + noise is chosen. With Gumbel noise -log(-log u) that is a draw from softmax(scores),
exactly. Two distributions that are nearly alike choose the same token with the same noise nearly always, which is why
a draft model's guesses come true (speculative.py), and why rounding that differs between batch sizes (about 1e-6)
hardly ever shows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from headwater.data import chance
from headwater.parts import must

SEEDS = 2**63


def check_seed(seed: object) -> None:
    law = "seed must be a whole number from 0 below 2**63"
    must(type(seed) is int and 0 <= seed < SEEDS, "generate", law, seed, "0 is usual")


def branch(seed: int, number: int) -> int:
    """The seed of the number-th answer to one question; the first has the seed itself."""
    return seed if number == 0 else int(chance.bits(seed, "answer", number)) % SEEDS


def left(scores: Tensor) -> list[Tensor]:
    """The tokens of each row of scores [B, V] that may still be drawn. Those at -inf never are, and cost nothing."""
    rows, tokens = (scores > -torch.inf).nonzero(as_tuple=True)
    return list(tokens.split(rows.bincount(minlength=len(scores)).tolist()))


def draw(scores: Tensor, tokens: Tensor, seed: int, step: int) -> int:
    """One of the tokens [N], from softmax(scores[tokens])."""
    noise = torch.from_numpy(gumbel(seed, step, tokens.cpu().numpy())).to(scores.device)
    return int(tokens[(scores[tokens].double() + noise).argmax()])


def gumbel(seed: int, step: int, tokens: np.ndarray) -> np.ndarray:
    """Gumbel noise, one number a token."""
    u = chance.uniform(seed, "token", step, tokens)
    return -np.log(-np.log(np.maximum(u, 2.0**-54)))
