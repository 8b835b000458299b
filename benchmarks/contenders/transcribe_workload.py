"""The workload of benchmarks/transcribe.py: transcribe one recording with each number of beams, once a round."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def serve(beam_sizes: list[str], seconds: float, transcribe: Callable[[int], str]) -> None:
    """Print the texts; then for each line of the standard input how many times faster than real time each search is."""
    print(json.dumps({"texts": {beam: transcribe(int(beam)) for beam in beam_sizes}}), flush=True)
    for _line in sys.stdin:
        figures = {}
        for beam in beam_sizes:
            begin = time.perf_counter()
            transcribe(int(beam))
            figures[f"x real time, beam {beam}"] = seconds / (time.perf_counter() - begin)
        print(json.dumps(figures), flush=True)
