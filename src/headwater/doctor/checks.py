"""Checks of the environment: each yields findings, a problem or a note, with a remedy.

A problem prevents something from working; a note costs speed or convenience.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headwater.doctor.environment import IMPORTED
from headwater.i18n import _, join

Facts = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    level: str  # "problem" or "note"
    message: str
    remedy: str


def run_checks(facts: Facts) -> list[Finding]:
    """All findings, problems first."""
    findings = [finding for check in CHECKS for finding in check(facts)]
    return sorted(findings, key=lambda finding: finding.level != "problem")


CHECKS: list[Callable[[Facts], Iterator[Finding]]] = []


def register_check(rule: Callable[[Facts], Iterator[Finding]]) -> Callable[[Facts], Iterator[Finding]]:
    CHECKS.append(rule)
    return rule


@register_check
def check_torch_import(facts: Facts) -> Iterator[Finding]:
    """torch must be importable."""
    state = facts["backends"]["torch"]
    if state != IMPORTED:
        remedy = _("reinstall it with the project's constraints.txt: pip install -c constraints.txt torch")
        yield Finding("problem", _("torch cannot be imported ({state})", state=state), remedy)


@register_check
def check_versions(facts: Facts) -> Iterator[Finding]:
    """Packages must be installed, in the versions that pyproject.toml requires."""
    try:
        lines = importlib.metadata.requires("headwater") or []
        from packaging.requirements import Requirement
    except ModuleNotFoundError as error:  # PackageNotFoundError is one
        remedy = _("run pip install -c constraints.txt -e . in the project's folder")
        yield Finding("problem", _("headwater is not fully installed (no {name})", name=error.name), remedy)
        return
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = facts["versions"].get(requirement.name, _("unknown"))
        if version is None or (version != "unknown" and not requirement.specifier.contains(version, prereleases=True)):
            remedy = _('pip install "{need}"', need=requirement)
            if version is None:
                yield Finding(
                    "problem",
                    _("{name} is not installed, {need} is needed", name=requirement.name, need=requirement),
                    remedy,
                )
            else:
                yield Finding(
                    "problem",
                    _(
                        "{name} {have} is installed, {need} is needed",
                        name=requirement.name,
                        have=version,
                        need=requirement,
                    ),
                    remedy,
                )


@register_check
def check_free_memory(facts: Facts) -> Iterator[Finding]:
    """Little free memory."""
    free_gb = facts["machine"]["memory free GB"]
    if free_gb is not None and free_gb < 2:
        remedy = _("close other programs; use a smaller preset, a smaller batch, or gradient checkpointing")
        yield Finding("note", _("only {free} GB of memory are free", free=free_gb), remedy)


@register_check
def check_free_disk(facts: Facts) -> Iterator[Finding]:
    """Little free disk space."""
    free_gb = facts["machine"]["disk free GB"]
    if free_gb < 2:
        level = "problem" if free_gb < 0.2 else "note"
        yield Finding(
            level,
            _("only {free} GB of disk are free here", free=free_gb),
            _("free some disk space: a run keeps several checkpoints"),
        )


@register_check
def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Little shared memory (/dev/shm), through which processes pass data."""
    size = facts["machine"]["shared memory GB"]
    if size is not None and size < 0.25:
        remedy = _("in a container, start it with --shm-size=1g; else read data in one process")
        yield Finding("note", _("processes share only {size} GB of memory", size=size), remedy)


@register_check
def check_threads(facts: Facts) -> Iterator[Finding]:
    """More threads than cores, or fewer."""
    threads = facts["threads"].get("torch")
    cores = facts["machine"]["usable cores"]
    if threads is None:
        return
    if threads > max(1, cores):
        message = _(
            "torch uses {threads} threads on {cores:g} cores: they wait for each other", threads=threads, cores=cores
        )
        yield Finding("note", message, _("export OMP_NUM_THREADS={value}", value=max(1, int(cores))))
    if threads < cores / 2 and not facts["threads"].get("OMP_NUM_THREADS"):
        message = _("torch uses {threads} of {cores:g} cores", threads=threads, cores=cores)
        yield Finding("note", message, _("export OMP_NUM_THREADS={cores}", cores=int(cores)))


@register_check
def check_load(facts: Facts) -> Iterator[Finding]:
    """Other programs use the cores."""
    load = facts["machine"]["load"]
    cores = facts["machine"]["usable cores"]
    if load is not None and load > 0.5 * cores:
        message = _(
            "other programs keep {load:g} of {cores:g} cores busy: the speeds measured here are too low",
            load=load,
            cores=cores,
        )
        yield Finding(
            "note", message, _("find them with top, close what is not needed, then run headwater doctor again")
        )


@register_check
def check_bf16(facts: Facts) -> Iterator[Finding]:
    """bf16 may be slower than fp32 on an old processor."""
    speed = facts.get("speed") or {}
    fp32_speed = speed.get("matmul fp32 GFLOP/s")
    bf16_speed = speed.get("matmul bf16 GFLOP/s")
    if fp32_speed and bf16_speed is not None and bf16_speed < 0.9 * fp32_speed:
        ratio = fp32_speed / max(bf16_speed, 1)
        message = _("bf16 is {ratio:.1f} times slower than fp32 on this processor", ratio=ratio)
        yield Finding("note", message, _("train and generate with --dtype fp32; bf16 only saves memory here"))


@register_check
def check_compiler(facts: Facts) -> Iterator[Finding]:
    """torch.compile needs a C++ compiler and the headers of Python."""
    missing = [name for name in ("C++ compiler", "Python headers") if not facts["backends"][name]]
    if missing:
        remedy = _("install them (Debian, Ubuntu: apt install g++ python3-dev); all else works without")
        missing_names = join(_(" and no "), map(_, missing))
        yield Finding("note", _("torch.compile cannot run: no {missing}", missing=missing_names), remedy)


@register_check
def check_terminal_encoding(facts: Facts) -> Iterator[Finding]:
    """A terminal that cannot show Chinese."""
    encoding = (facts["terminal"]["encoding"] or "").lower().replace("-", "")
    if encoding not in ("utf8", "gb18030", "cp65001"):
        message = _(
            "the terminal's encoding is {value}: Chinese and symbols may show as ?", value=encoding or _("unknown")
        )
        yield Finding("note", message, _("export PYTHONIOENCODING=utf-8, or choose a UTF-8 locale such as C.UTF-8"))
