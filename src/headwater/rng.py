"""Counter-based random numbers (splitmix64), keyed permutations (Feistel network) and Gumbel-max sampling.

There is no state: every number is a function of a key such as (seed, epoch, index, purpose). A resumed run draws the
same numbers, with any number of processes and in any batch.

    random_bits, uniform, randint   the splitmix64 finalizer folded over the key
    permutation                     argsort of random bits, for small sizes
    permuted_index                  a Feistel network over the next power of four, with cycle walking: the example at
                                    a position of an epoch, without a stored list
    gumbel_max                      a sample of softmax(logits) as argmax(logits + noise). The noise is a function of
                                    (seed, step, token) alone, so a text is the same alone, in a batch and streamed,
                                    and a draft model's guesses mostly agree with the target model's draws
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headwater.errors import BadInput
from headwater.i18n import _
from headwater.parts import must

if TYPE_CHECKING:
    from torch import Tensor

Key: TypeAlias = "int | str | np.ndarray"

_GOLDEN_GAMMA, _MIX_1, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: a bijection of 64-bit numbers; each input bit flips half of the output bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def random_bits(*keys: Key) -> np.ndarray:
    """64 random bits for each combination of the keys; arrays among them broadcast against each other."""
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = mix64((state ^ _as_uint64(key)) + _GOLDEN_GAMMA)
    is_scalar = not any(isinstance(key, np.ndarray) and key.ndim for key in keys)
    return state.reshape(()) if is_scalar else state


def uniform(*keys: Key) -> np.ndarray:
    """Uniform numbers in [0, 1), with 53 random bits each."""
    return (random_bits(*keys) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def randint(high: int, *keys: Key) -> np.ndarray:
    """Uniform integers in [0, high). The bias is high / 2**53, too small to be measured."""
    return (uniform(*keys) * high).astype(np.int64)


def dropout_seed(seed: int, step: int, micro_batch: int, rank: int) -> int:
    """The seed of the dropout of one micro-batch: there is no state of random numbers to save."""
    return int(random_bits(seed, step, micro_batch, rank, "dropout")) % 2**63


def permutation(n: int, *keys: Key) -> np.ndarray:
    """A random permutation of range(n), built in memory."""
    return np.argsort(random_bits(*keys, np.arange(n)), kind="stable")


def _as_uint64(key: Key) -> np.ndarray:
    if isinstance(key, str):
        return np.frombuffer(hashlib.blake2b(key.encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    if isinstance(key, np.ndarray):
        return key.astype(np.uint64)
    return np.array([key % 2**64], np.uint64)


# ------------------------------------------------------------------------------------------------ permuted examples

FEISTEL_ROUNDS = 8  # four are enough for large sizes; small ones need more for equally likely permutations


def permuted_index(positions: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """The examples at these positions of the epoch; over all positions, each example exactly once.

    >>> sorted(permuted_index(np.arange(10), 10, seed=1, epoch=0).tolist()) == list(range(10))
    True
    """
    if size < 1:
        raise BadInput(
            _("a permutation needs at least one example, got {size}; check that the data is not empty", size=size)
        )
    positions = np.asarray(positions)
    if positions.size and (positions.min() < 0 or positions.max() >= size):
        raise BadInput(
            _(
                "positions must be from 0 to {size}, got {min} to {max}",
                size=size - 1,
                min=positions.min(),
                max=positions.max(),
            )
        )
    keys = random_bits(seed, epoch, "order", np.arange(FEISTEL_ROUNDS))
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    indices = _feistel(positions.astype(np.uint64), half, keys)
    while (outside := indices >= size).any():  # cycle walking: permute again until the index is in range
        indices[outside] = _feistel(indices[outside], half, keys)
    return indices.astype(np.int64)


def _feistel(x: np.ndarray, half: np.uint64, keys: np.ndarray) -> np.ndarray:
    """A Feistel network over 2 * half bits: each round xors the mixed right half into the left one, and swaps."""
    mask = (np.uint64(1) << half) - np.uint64(1)
    left = x >> half
    right = x & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half) | right


# ------------------------------------------------------------------------------------------------ Gumbel-max sampling

SEED_LIMIT = 2**63


def check_seed(seed: object) -> None:
    """Raise a fault unless the seed is an integer in [0, 2**63)."""
    requirement = _("seed must be an integer from 0 below 2**63")
    must(type(seed) is int and 0 <= seed < SEED_LIMIT, "generate", requirement, seed, _("0 is usual"))


def fork_seed(seed: int, index: int) -> int:
    """The seed of the index-th sample of one prompt; the first sample has the seed itself."""
    return seed if index == 0 else int(random_bits(seed, "answer", index)) % SEED_LIMIT


def allowed_tokens(logits: Tensor) -> list[Tensor]:
    """The token ids of each row of logits [B, V] that are not at -inf: only these can be drawn."""
    import torch

    rows, tokens = (logits > -torch.inf).nonzero(as_tuple=True)
    return list(tokens.split(rows.bincount(minlength=len(logits)).tolist()))


def gumbel_max(logits: Tensor, tokens: Tensor, seed: int, step: int) -> int:
    """One of the tokens [N], drawn from softmax(logits[tokens]) by the Gumbel-max trick."""
    import torch

    noise = torch.from_numpy(gumbel_noise(seed, step, tokens.cpu().numpy())).to(logits.device)
    return int(tokens[(logits[tokens].double() + noise).argmax()])


def gumbel_noise(seed: int, step: int, tokens: np.ndarray) -> np.ndarray:
    """Gumbel noise -log(-log u), one number per token."""
    u = uniform(seed, "token", step, tokens)
    return -np.log(-np.log(np.maximum(u, 2.0**-54)))
