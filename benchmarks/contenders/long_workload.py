"""One attention over N tokens of one row, 8 heads of 64, in a fresh process: seconds (the median), and peak memory.

long_workload.py NAME N forward|both     prints JSON: seconds, processor seconds, peak MB above q, k and v, error

Layers are timed as their users call them, but with projections that return given tensors, so that only attention is
measured. The output of a few rows is compared with a dense re-statement in float64.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch
from long_attentions import BUILDERS, HEADS, WIDTH, Inputs

ROWS_CHECKED = 6


def status_mb(name: str) -> float:
    """VmRSS or VmHWM of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def run_once(run, inputs: Inputs, mode: str) -> torch.Tensor:
    if mode == "forward":
        with torch.no_grad():
            return run()
    out = run()
    torch.autograd.grad(out, inputs.tensors + inputs.global_tensors, inputs.grad_out, allow_unused=True)
    return out.detach()


def main() -> None:
    name, n, mode = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    inputs = Inputs.draw(n, needs_grad=mode == "both")
    run, reference = BUILDERS[name](inputs)

    # the first run: its memory
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = status_mb("VmRSS")
    out = run_once(run, inputs, mode)
    peak = status_mb("VmHWM") - before

    # its output
    rows = sorted({0, 1, n // 3, n // 2, n - n // 5, n - 1})[:ROWS_CHECKED]
    wanted = torch.stack([reference(row) for row in rows])  # [rows, H, D]
    got = out.view(n, HEADS, WIDTH)[rows].double()
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()

    # its time
    seconds, processor_seconds = [], []
    while len(seconds) < 2 or (len(seconds) < 7 and sum(seconds) < 2):
        begun, begun_processor = time.perf_counter(), time.process_time()
        run_once(run, inputs, mode)
        seconds.append(time.perf_counter() - begun)
        processor_seconds.append(time.process_time() - begun_processor)
    result = {"seconds": statistics.median(seconds), "processor seconds": statistics.median(processor_seconds)}
    print(json.dumps({**result, "peak MB": peak, "error": error}), flush=True)


if __name__ == "__main__":
    main()
