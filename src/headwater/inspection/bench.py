"""A small bench that needs no peers but torch: limits, training steps, decoding, and whether the machine was quiet."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path
from typing import Any

from headwater.inspection import machine, steps

QUIET = 0.05  # the share of the processors that others may take before figures are not to be trusted
PEER = "torch.nn.Transformer"


class Watch:
    """What others take of the processors while we work: 1 is all of them; None where the system does not tell."""

    def __init__(self) -> None:
        self.began, self.all, self.own = time.monotonic(), processors(), time.process_time()

    def others(self) -> float | None:
        now = processors()
        if now is None or self.all is None:
            return None
        room = (time.monotonic() - self.began) * (os.cpu_count() or 1)
        return max(0.0, now - self.all - (time.process_time() - self.own)) / max(room, 1e-9)


def processors() -> float | None:
    """Seconds all processors have worked for anyone, from /proc/stat."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        parts = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return (sum(parts) - parts[3] - parts[4]) / os.sysconf("SC_CLK_TCK")
    return None


def spread(values: list[float]) -> dict[str, float]:
    """The median and the quartiles."""
    values, quarter = sorted(values), len(values) // 4
    return {"median": statistics.median(values), "low": values[quarter], "high": values[-1 - quarter]}


def limits() -> dict[str, float]:
    found = machine.speed()
    return {name: found[name] for name in ("matmul fp32 GFLOP/s", "memory GB/s") if name in found}


def training(name: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a step, ours and torch.nn.Transformer's in turn; our ratio, and our share of the matmul peak."""
    work = steps.WORKS[name]
    times = steps.in_turn({"headwater": steps.ours(work), PEER: steps.theirs(work)}, work, rounds)
    figures = {who: spread([1000 * t for t in values]) for who, values in times.items()}
    own = figures["headwater"]["median"]
    peak = machine.product(_fp32(), 0.3)
    return {
        "ms a step": figures,
        "times as fast": figures[PEER]["median"] / own,
        "share of matmul peak": work.flop / 1e6 / own / peak,
    }


def decoding(model: str, tokens: int, rounds: int, prompt: int = 32) -> dict[str, dict[str, float]]:
    """Tokens a second of one stream: reading a prompt, and writing greedily after it."""
    from headwater.families.loading import load
    from headwater.generation.reading import read
    from headwater.generation.slots import Slots

    loaded, found = load(model), []
    ids = [n % 97 + 3 for n in range(prompt)]
    for _ in range(rounds + 1):
        slots = Slots(loaded.model, [0], most=prompt + tokens)
        began = time.perf_counter()
        token = int(read(loaded.model, slots, [ids]).argmax())
        middle = time.perf_counter()
        for _ in range(tokens - 1):
            token = int(read(loaded.model, slots, [[token]]).argmax())
        found.append((prompt / (middle - began), (tokens - 1) / (time.perf_counter() - middle)))
    names = ("prompt tokens/s", "written tokens/s")
    return {name: spread([turn[i] for turn in found[1:]]) for i, name in enumerate(names)}


def measured(works: list[str], rounds: int, model: str | None = None, tokens: int = 64) -> dict[str, Any]:
    """Everything, as plain data."""
    import torch

    watch = Watch()
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "rounds": rounds, "limits": limits()}
    found["training"] = {name: training(name, rounds) for name in works}
    if model is not None:
        found["decoding"] = {model: decoding(model, tokens, rounds)}
    others = watch.others()
    return {**found, "others": others, "quiet": None if others is None else others <= QUIET}


def _fp32() -> Any:
    import torch

    return torch.float32
