"""From the facts about a machine to findings: each says what is amiss and what to do about it.

A problem keeps something from working; a note costs speed or comfort.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    level: str  # "problem" or "note"
    says: str
    remedy: str


def findings(facts: Facts) -> list[Finding]:
    """All findings, problems first."""
    found = [finding for check in CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: finding.level != "problem")


CHECKS: list[Callable[[Facts], Iterator[Finding]]] = []


def check(rule: Callable[[Facts], Iterator[Finding]]) -> Callable[[Facts], Iterator[Finding]]:
    CHECKS.append(rule)
    return rule


@check
def torch_imports(facts: Facts) -> Iterator[Finding]:
    state = facts["backends"]["torch"]
    if state != "imported":
        remedy = "install it again with the project's constraints.txt: pip install -c constraints.txt torch"
        yield Finding("problem", f"torch cannot be imported ({state})", remedy)


@check
def versions_fit(facts: Facts) -> Iterator[Finding]:
    try:
        lines = importlib.metadata.requires("headwater") or []
        from packaging.requirements import Requirement
    except ModuleNotFoundError as error:  # PackageNotFoundError is one
        remedy = "run pip install -c constraints.txt -e . in the project's folder"
        yield Finding("problem", f"headwater is not fully installed (no {error.name})", remedy)
        return
    for need in map(Requirement, lines):
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        have = facts["versions"].get(need.name, "unknown")
        if have is None or (have != "unknown" and not need.specifier.contains(have, prereleases=True)):
            remedy = f'pip install "{need}"'
            if have is None:
                yield Finding("problem", f"{need.name} is not installed, {need} is needed", remedy)
            else:
                yield Finding("problem", f"{need.name} {have} is installed, {need} is needed", remedy)


@check
def memory_suffices(facts: Facts) -> Iterator[Finding]:
    free = facts["machine"]["memory free GB"]
    if free is not None and free < 2:
        remedy = "close other programs; use a smaller preset, a smaller batch, or gradient checkpointing"
        yield Finding("note", f"only {free} GB of memory are free", remedy)


@check
def disk_suffices(facts: Facts) -> Iterator[Finding]:
    free = facts["machine"]["disk free GB"]
    if free < 2:
        level = "problem" if free < 0.2 else "note"
        yield Finding(level, f"only {free} GB of disk are free here", "make room: a run keeps several checkpoints")


@check
def shared_memory_suffices(facts: Facts) -> Iterator[Finding]:
    size = facts["machine"]["shared memory GB"]
    if size is not None and size < 0.25:
        remedy = "in a container, start it with --shm-size=1g; else read data in one process"
        yield Finding("note", f"processes share only {size} GB of memory", remedy)


@check
def threads_fit_cores(facts: Facts) -> Iterator[Finding]:
    threads, cores = facts["threads"].get("torch"), facts["machine"]["cores we may use"]
    if threads is None:
        return
    if threads > max(1, cores):
        says = f"torch uses {threads} threads on {cores:g} cores: they wait for each other"
        yield Finding("note", says, f"export OMP_NUM_THREADS={max(1, int(cores))}")
    if threads < cores / 2 and not facts["threads"].get("OMP_NUM_THREADS"):
        says = f"torch uses {threads} of {cores:g} cores"
        yield Finding("note", says, f"export OMP_NUM_THREADS={int(cores)}")


@check
def nothing_else_runs(facts: Facts) -> Iterator[Finding]:
    load, cores = facts["machine"]["load"], facts["machine"]["cores we may use"]
    if load is not None and load > 0.5 * cores:
        says = f"other programs keep {load:g} of {cores:g} cores busy: the speeds measured here are too low"
        yield Finding("note", says, "look with top, close what is not needed, then run headwater doctor again")


@check
def bf16_is_no_slower(facts: Facts) -> Iterator[Finding]:
    speed = facts.get("speed") or {}
    full, half = speed.get("matmul fp32 GFLOP/s"), speed.get("matmul bf16 GFLOP/s")
    if full and half is not None and half < 0.9 * full:
        says = f"bf16 is {full / max(half, 1):.1f} times slower than fp32 on this processor"
        yield Finding("note", says, "train and generate with --dtype fp32; bf16 only saves memory here")


@check
def compiling_works(facts: Facts) -> Iterator[Finding]:
    missing = [name for name in ("C++ compiler", "Python headers") if not facts["backends"][name]]
    if missing:
        remedy = "install them (Debian, Ubuntu: apt install g++ python3-dev); all else works without"
        yield Finding("note", f"torch.compile cannot run: no {' and no '.join(missing)}", remedy)


@check
def terminal_shows_all(facts: Facts) -> Iterator[Finding]:
    encoding = (facts["terminal"]["encoding"] or "").lower().replace("-", "")
    if encoding not in ("utf8", "gb18030", "cp65001"):
        says = f"the terminal's encoding is {encoding or 'unknown'}: Chinese and symbols may show as ?"
        yield Finding("note", says, "export PYTHONIOENCODING=utf-8, or choose a UTF-8 locale such as C.UTF-8")
