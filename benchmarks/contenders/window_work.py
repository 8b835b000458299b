"""Attention of one layer over n places, in a fresh process: full (PyTorch's fused kernel) or a window (our core's).

window_work.py full|window N forward|both     prints seconds (the median) and the peak MB above its inputs

Some rows of its answer are compared with the formula before anything is printed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from memory_work import peak_mb

from headwater.core.kernels import SDPA
from headwater.core.masks import AttentionMask, Causal, SlidingWindow
from headwater.core.positions import NoPosition

HEADS, WIDTH, SEEN = 8, 64, 256


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: int) -> None:
    """Rows at the beginning, in the middle and at the end are softmax(q kᵀ / √d) v over the keys they see."""
    n = q.shape[2]
    for row in (0, 1, n // 2, n - 1):
        first = max(0, row + 1 - seen)
        keys, values = k[:, :, first : row + 1], v[:, :, first : row + 1]
        weights = (q[:, :, row : row + 1] @ keys.mT * WIDTH**-0.5).softmax(-1)
        torch.testing.assert_close(out[:, :, row : row + 1], weights @ values, atol=1e-4, rtol=1e-4)


def main() -> None:
    kind, n, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=way == "both") for _ in range(3))
    kernel, places = SDPA().build(WIDTH**-0.5, 0.0), torch.arange(n)[None]
    rule = SlidingWindow(SEEN) if kind == "window" else Causal()
    sight = AttentionMask(rule, NoPosition().build(WIDTH, HEADS), places, places, aligned=True)
    before, times = peak_mb(), []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 20):
        began = time.perf_counter()
        out = kernel(q, k, v, sight, None)
        if way == "both":
            out.sum().backward()
        times.append(time.perf_counter() - began)
    used = peak_mb() - before
    with torch.no_grad():
        check(out, q, k, v, SEEN if kind == "window" else n)
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak MB": used}), flush=True)


if __name__ == "__main__":
    main()
