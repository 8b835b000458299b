"""Is there room for a model? Counted from its spec before it is built: one layer of each kind, times its number."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headwater.core import Model, Stack
from headwater.errors import BadFile, Unavailable

CGROUP = Path("/sys/fs/cgroup/memory.max")


def check_room(spec: Model, tensors: int, where: object) -> None:
    """Refuse a model that has more layers than the file has tensors, or more weights than the machine has memory."""
    depth = sum(len(stack.layers) for stack in _stacks(spec))
    if tensors < depth:
        raise BadFile(f"{where}: config.json speaks of {depth:,} layers, but the file holds {tensors:,} tensors in all")
    count, room = weights_of(spec), memory()
    if 4 * count > room:
        raise Unavailable(
            f"{where}: the model has {count:,} weights, {_gigabytes(4 * count)} in float32, and this machine has "
            f"{_gigabytes(room)} of memory; choose a smaller one"
        )


def weights_of(spec: Model) -> int:
    """How many weights a model has, tied ones counted at each place, from one layer of each kind."""
    model = replace(spec, tied=(), encoder=_thin(spec.encoder), decoder=_thin(spec.decoder)).skeleton()
    total = sum(math.prod(p.shape) for p in model.parameters())
    for side in ("encoder", "decoder"):
        if (stack := getattr(spec, side)) is not None:
            times = Counter(stack.layers)
            for kind, layer in zip(times, getattr(model, side).layers, strict=True):
                total += (times[kind] - 1) * sum(math.prod(p.shape) for p in layer.parameters())
    return total


def memory() -> int:
    """Bytes of memory this machine, or the container we run in, has; where that is not told, no bound."""
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 1 << 62
    limit = CGROUP.read_text().strip() if CGROUP.is_file() else "max"
    return min(physical, int(limit)) if limit.isdecimal() else physical


def _stacks(spec: Model) -> Iterator[Stack]:
    return (stack for stack in (spec.encoder, spec.decoder) if stack is not None)


def _thin(stack: Stack | None) -> Stack | None:
    return None if stack is None else replace(stack, layers=tuple(dict.fromkeys(stack.layers)), order=())


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
