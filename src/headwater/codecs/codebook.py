"""Codebooks: vector quantization, a vector becomes the number of the nearest row of a table.

    quantized = x + (table[id] - x).detach()          straight-through: the gradient passes as if nothing had happened

EMACodebook moves each row to the mean of the vectors that chose it (exponential moving average, van den Oord et al.
2017), so it needs no gradient; rows that are chosen no more restart at vectors of the batch. ResidualCodebooks
quantizes what the codebooks before have left over, as sound codecs do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

EPSILON = 1e-5  # Laplace smoothing of the counts


class Quantized(NamedTuple):
    """Quantized vectors [..., D] with a straight-through gradient, their ids, and the commitment loss per value."""

    vectors: Tensor
    ids: Tensor
    commitment: Tensor


def nearest_rows(x: Tensor, table: Tensor) -> Tensor:
    """The row of a table [K, D] that is nearest to each vector [..., D]: argmin |x|² - 2 x·e + |e|², in its dtype."""
    flat = x.flatten(0, -2).to(table.dtype)
    with torch.autocast(flat.device.type, enabled=False):
        products = flat @ table.T
    distances = flat.square().sum(1, keepdim=True) - 2 * products + table.square().sum(1)  # [N, K]
    return distances.argmin(1).view(x.shape[:-1])


def frozen(*size: int, value: float = 0.0) -> nn.Parameter:
    """A parameter without a gradient: state that is saved with the weights."""
    return nn.Parameter(torch.full(size, value), requires_grad=False)


class EMACodebook(nn.Module):
    """A codebook learned by exponential moving averages.

    table [K, D]; counts [K] and sums [K, D]: moving averages of how many vectors chose a row, and of their sum.
    updates [1]: how often the rows moved; before the first time, vectors of the first batch become the first rows.
    It seeds the choice of the vectors at which dead rows restart, so that a resumed run makes the same choice.
    """

    def __init__(self, num_codes: int, width: int, decay: float = 0.99, min_count: float = 0.0) -> None:
        super().__init__()
        self.decay = decay
        self.min_count = min_count  # a row that fewer vectors choose on average is dead
        self.table = nn.Parameter(torch.randn(num_codes, width), requires_grad=False)
        self.counts = frozen(num_codes)
        self.sums = frozen(num_codes, width)
        self.updates = frozen(1)

    def forward(self, x: Tensor) -> Quantized:
        """x [..., D]. In training the rows move, and dead ones restart. In the dtype of the table."""
        x = x.to(self.table.dtype)
        flat = x.detach().flatten(0, -2)
        moves = self.training and torch.is_grad_enabled()
        if moves and not bool(self.updates):
            self.start(flat)
        ids = nearest_rows(x.detach(), self.table)
        vectors = self.table[ids]
        commitment = (x - vectors).square().mean()
        if moves:
            self.update(flat, ids.flatten())
        return Quantized(x + (vectors - x).detach(), ids, commitment)

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        """The first rows: vectors of the first batch [N, D]."""
        self.table.copy_(_draw_vectors(x, len(self.table), 0))
        self.counts.fill_(1.0)
        self.sums.copy_(self.table)

    @torch.no_grad()
    def update(self, x: Tensor, ids: Tensor) -> None:
        """Move the rows towards the means of their vectors x [N, D]."""
        counts = torch.bincount(ids, minlength=len(self.table)).to(x.dtype)  # [K]
        sums = torch.zeros_like(self.sums).index_add_(0, ids, x)  # [K, D]
        sum_over_ranks(counts, sums)
        self.counts.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(sums, 1 - self.decay)

        # the mean of each row's vectors, from smoothed counts
        total = self.counts.sum()
        smoothed = (self.counts + EPSILON) / (total + len(self.table) * EPSILON) * total
        self.table.copy_(self.sums / smoothed[:, None])

        # dead rows restart at vectors of the batch
        dead = self.counts < self.min_count
        self.updates.add_(1)
        fresh = _draw_vectors(x, len(self.table), int(self.updates))
        self.table[dead] = fresh[dead]
        self.sums[dead] = fresh[dead] * self.min_count
        self.counts[dead] = self.min_count

    def usage(self, ids: Tensor) -> float:
        """Perplexity of the ids: how many rows are in use, as if all of them were equally often."""
        return code_perplexity(ids, len(self.table))


class ResidualCodebooks(nn.Module):
    """Residual vector quantization: each codebook quantizes what those before it left over. ids [..., K]."""

    def __init__(self, num_books: int, num_codes: int, width: int, decay: float = 0.99, min_count: float = 0.0) -> None:
        super().__init__()
        self.books = nn.ModuleList(EMACodebook(num_codes, width, decay, min_count) for _ in range(num_books))

    @property
    def tables(self) -> list[Tensor]:
        """The table [K, D] of each codebook."""
        return [book.get_parameter("table") for book in self.books]

    def forward(self, x: Tensor) -> Quantized:
        residual = x
        vectors = torch.zeros_like(x)
        commitment = x.new_zeros(())
        ids = []
        for book in self.books:
            quantized = book(residual)
            residual = residual - quantized.vectors.detach()
            vectors = vectors + quantized.vectors.detach()
            commitment = commitment + quantized.commitment
            ids.append(quantized.ids)
        return Quantized(x + (vectors - x).detach(), torch.stack(ids, -1), commitment / len(ids))

    def encode(self, x: Tensor, num_books: int | None = None) -> Tensor:
        """Vectors [..., D] to ids [..., K] of the first num_books codebooks."""
        ids = []
        for table in self.tables[:num_books]:
            ids.append(nearest_rows(x, table))
            x = x - table[ids[-1]]
        return torch.stack(ids, -1)

    def decode(self, ids: Tensor) -> Tensor:
        """Ids [..., K] of the first K codebooks to vectors [..., D]: the sum of their rows."""
        tables = self.tables[: ids.shape[-1]]
        return torch.stack([table[ids[..., k]] for k, table in enumerate(tables)]).sum(0)


def code_perplexity(ids: Tensor, num_codes: int) -> float:
    """exp(entropy) of the ids: from 1, one code for all, to num_codes, all equally often."""
    probs = torch.bincount(ids.flatten(), minlength=num_codes).float() / max(1, ids.numel())
    return float(torch.exp(-(probs * probs.clamp(min=1e-12).log()).sum()))


def sum_over_ranks(*tensors: Tensor) -> None:
    """Add up statistics of all processes that train together, in place."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


def _draw_vectors(x: Tensor, count: int, seed: int) -> Tensor:
    """`count` of the vectors [N, D], each at most once more often than any other; those of rank 0 on all ranks."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).to(x.device)
    drawn = x[order.repeat(-(-count // len(x)))[:count]]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.broadcast(drawn, 0)
    return drawn
