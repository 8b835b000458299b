"""The command headwater doctor: the environment, its measured speed, and a remedy for each problem."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.errors import Unavailable
from headwater.i18n import _, display_width, padded

if TYPE_CHECKING:
    from headwater.doctor.checks import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=_("the report as JSON"))
    parser.add_argument("--no-speed", action="store_true", help=_("skip the speed measurement"))


def run(args: argparse.Namespace) -> int:
    from headwater.doctor import checks, environment

    facts = environment.collect_facts()
    if not args.no_speed:
        facts["speed"] = environment.measure_speed()
    missing = kernels.missing_kernels()
    facts["backends"]["C kernels"] = missing.reason if missing else True
    findings = checks.run_checks(facts)
    if missing:
        differs = _("; the greedy text of a quantized model may differ")
        findings.append(checks.Finding("note", f"{missing}{differs}", missing.remedy))
    if args.json:
        facts["findings"] = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        print_report(facts, findings)
    return Unavailable.exit_code if any(f.level == "problem" for f in findings) else 0


SECTIONS = {
    "versions": _("versions"),
    "machine": _("machine"),
    "threads": _("threads"),
    "backends": _("back ends"),
    "speed": _("measured speed"),
    "terminal": _("terminal"),
}
LABELS = {
    "system": _("system"),
    "processor": _("processor"),
    "cores": _("cores"),
    "usable cores": _("usable cores"),
    "features": _("features"),
    "load": _("load"),
    "memory GB": _("memory GB"),
    "memory free GB": _("memory free GB"),
    "disk free GB": _("disk free GB"),
    "shared memory GB": _("shared memory GB"),
    "torch": _("torch"),
    "torch inter-op threads": _("torch inter-op threads"),
    "encoding": _("encoding"),
    "file names": _("file names"),
    "locale": _("locale"),
    "terminal": _("terminal"),
    "columns": _("columns"),
    "xFormers": _("xFormers"),
    "C++ compiler": _("C++ compiler"),
    "C kernels": _("C kernels"),
    "Python headers": _("Python headers"),
    "fused attention": _("fused attention"),
    "vector width": _("vector width"),
    "oneDNN": _("oneDNN"),
    "CUDA": _("CUDA"),
    "Apple GPU": _("Apple GPU"),
    "matmul fp32 GFLOP/s": _("matmul fp32 GFLOP/s"),
    "matmul bf16 GFLOP/s": _("matmul bf16 GFLOP/s"),
    "memory GB/s": _("memory GB/s"),
}
MARKS = {"problem": ("[red]✗[/red]", _("problem")), "note": ("[yellow]![/yellow]", _("note"))}


def print_report(facts: dict[str, Any], findings: list[Finding]) -> None:
    """Print the facts by section, then the findings with their remedies."""
    for section, title in SECTIONS.items():
        if not (rows := facts.get(section)):
            continue
        names = {name: str(LABELS.get(name, name)) for name in rows}
        width = max(map(display_width, names.values()))
        lines = [
            f"  {padded(names[name], width)}  {escape_markup(format_value(value))}" for name, value in rows.items()
        ]
        print_lines(f"[bold]{title}[/bold]", *lines)
    for finding in findings:
        mark, level_name = MARKS[finding.level]
        print_lines(
            "",
            f"{mark} [bold]{level_name}[/bold] {escape_markup(str(finding.message))}",
            f"    → {escape_markup(str(finding.remedy))}",
        )
    if not findings:
        print_lines("", f"[green]✓[/green] {_('nothing to fix')}")


def print_lines(*lines: str) -> None:
    """Print with rich's colors; without rich (a broken installation) as plain text."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        plain_lines = (re.sub(r"(?<!\\)\[/?[a-z]+\]", "", line) for line in lines)
        print(*(line.replace("\\[", "[") for line in plain_lines), sep="\n")
    else:
        Console(highlight=False, soft_wrap=True).print(*lines, sep="\n")


def escape_markup(text: str) -> str:
    """Escape brackets that are not rich markup: package[extra]."""
    return text.replace("[", "\\[")


def format_value(value: Any) -> str:
    """A fact as text: yes or no for a bool, a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return str(_("yes") if value else _("no"))
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return str(value)
