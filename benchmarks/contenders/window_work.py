"""Attention of one layer over n places, in a fresh process: full (PyTorch's fused kernel) or a window (our core's).

window_work.py full|window N forward|both     prints seconds (the median) and the peak MB above its inputs
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from memory_work import peak_mb

from headwater.core.kernels import Fused
from headwater.core.masks import Past, Sight, Window
from headwater.core.positions import NoPosition

HEADS, WIDTH, SEEN = 8, 64, 256


def main() -> None:
    kind, n, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, n, WIDTH, requires_grad=way == "both") for _ in range(3))
    kernel, places = Fused().build(WIDTH**-0.5, 0.0), torch.arange(n)[None]
    rule = Window(SEEN) if kind == "window" else Past()
    sight = Sight(rule, NoPosition().build(WIDTH, HEADS), places, places, aligned=True)
    before, times = peak_mb(), []
    while len(times) < 5 and (len(times) < 2 or sum(times) < 20):
        began = time.perf_counter()
        out = kernel(q, k, v, sight, None)
        if way == "both":
            out.sum().backward()
        times.append(time.perf_counter() - began)
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak MB": peak_mb() - before}), flush=True)


if __name__ == "__main__":
    main()
