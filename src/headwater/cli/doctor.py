"""headwater doctor: what this machine has, how fast it is, and what to do about each problem."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from headwater.cli.language import say
from headwater.errors import Unavailable

if TYPE_CHECKING:
    from headwater.inspection.advice import Finding


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help=say("the report as JSON", "以 JSON 输出"))
    parser.add_argument("--no-speed", action="store_true", help=say("measure no speed", "不测速"))


def run(args: argparse.Namespace) -> int:
    from headwater.inspection import advice, machine

    facts = machine.facts()
    if not args.no_speed:
        facts["speed"] = machine.speed()
    findings = advice.findings(facts)
    if args.json:
        facts["findings"] = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        show(facts, findings)
    return Unavailable.exit_code if any(f.level == "problem" for f in findings) else 0


SECTIONS = {
    "versions": ("versions", "版本"),
    "machine": ("machine", "机器"),
    "threads": ("threads", "线程"),
    "backends": ("back ends", "后端"),
    "speed": ("measured speed", "实测速度"),
    "terminal": ("terminal", "终端"),
}
MARKS = {"problem": ("[red]✗[/red]", "problem", "问题"), "note": ("[yellow]![/yellow]", "note", "提示")}


def show(facts: dict[str, Any], findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for section, title in SECTIONS.items():
        if section not in facts:
            continue
        console.print(f"[bold]{say(*title)}[/bold]")
        table = Table.grid(padding=(0, 2))
        for name, value in facts[section].items():
            table.add_row("", name, in_words(value))
        console.print(table)
    console.print()
    for finding in findings:
        mark, *words = MARKS[finding.level]
        console.print(f"{mark} [bold]{say(*words)}[/bold] {finding.says}\n    → {finding.remedy}")
    if not findings:
        console.print(f"[green]✓[/green] {say('nothing to mend', '一切正常')}")


def in_words(value: Any) -> str:
    """A fact as a reader wants it: yes and no for switches, a dash for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return say("yes", "有") if value else say("no", "无")
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return str(value)
