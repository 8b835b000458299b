"""18. Residual vector quantization: a vector becomes one code for each codebook, each of what those before left over.

ids[k] = the nearest row of table k to what is left        left = left - table k [ids[k]]
x ≈ Σ table k [ids[k]]                                     the sum of the rows, which is also how a decoder embeds codes
"""

from __future__ import annotations

import numpy as np


def quantize(x: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    """Vectors [N, D] -> ids [N, K] in K tables [codes, D]."""
    residual = x
    ids = []
    for table in tables:
        # |x - e|² without the term that is the same for all rows
        distances = np.square(table).sum(1) - 2 * residual @ table.T  # [N, codes]
        ids.append(distances.argmin(1))
        residual = residual - table[ids[-1]]
    return np.stack(ids, 1)


def sum_of_rows(ids: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    """Ids [N, K] -> vectors [N, D]; fewer codebooks than tables give a coarser vector."""
    rows = [table[book] for table, book in zip(tables, ids.T, strict=False)]
    return np.sum(rows, axis=0)
