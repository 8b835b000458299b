"""Attention of one layer over n positions, in a fresh process: full (PyTorch's fused kernel) or windowed (Headwater's).

sliding_window_workload.py full|window N forward|both     prints seconds (the median) and the peak MB above its inputs

Some rows of the output are compared with the formula before anything is printed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from memory_workload import peak_mb

from headwater.core.attention import Attention
from headwater.core.masks import AttentionMask, Causal, SlidingWindow
from headwater.core.positions import NoPosition

HEADS, WIDTH, WINDOW = 8, 64, 256


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> None:
    """Rows at the start, in the middle and at the end equal softmax(q kᵀ / √d) v over their visible keys."""
    n = q.shape[2]
    for row in (0, 1, n // 2, n - 1):
        first = max(0, row + 1 - window)
        keys, values = k[:, :, first : row + 1], v[:, :, first : row + 1]
        weights = (q[:, :, row : row + 1] @ keys.mT * WIDTH**-0.5).softmax(-1)
        torch.testing.assert_close(out[:, :, row : row + 1], weights @ values, atol=1e-4, rtol=1e-4)


def main() -> None:
    kind, n, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=mode == "both") for _ in range(3))
    rule = SlidingWindow(WINDOW) if kind == "window" else Causal()
    kernel, positions = Attention(HEADS, mask=rule).build_kernel(WIDTH), torch.arange(n)[None]
    mask = AttentionMask(rule, NoPosition().build(WIDTH, HEADS), positions, positions, aligned=True)
    before, times = peak_mb(), []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 20):
        start = time.perf_counter()
        out = kernel(q, k, v, mask, None)
        if mode == "both":
            out.sum().backward()
        times.append(time.perf_counter() - start)
    peak = peak_mb() - before
    with torch.no_grad():
        check(out, q, k, v, WINDOW if kind == "window" else n)
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak MB": peak}), flush=True)


if __name__ == "__main__":
    main()
