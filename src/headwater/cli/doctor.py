"""headwater doctor: what this machine has, how fast it is, and what to do about each problem."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

from headwater.cli import kernels
from headwater.cli.language import say
from headwater.errors import Unavailable
from headwater.i18n import filled, width

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
    lacking = kernels.missing()
    facts["backends"]["C kernels"] = lacking.why if lacking else True
    findings = advice.findings(facts)
    if lacking:
        differs = say("; the greedy text of a packed model may differ", "；量化模型的贪心文本可能不同")
        findings.append(advice.Finding("note", f"{lacking}{differs}", lacking.remedy))
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
    for section, title in SECTIONS.items():
        if not (rows := facts.get(section)):
            continue
        names = {name: say(name) for name in rows}
        wide = max(map(width, names.values()))
        lines = [f"  {filled(names[name], wide)}  {plain(in_words(value))}" for name, value in rows.items()]
        tell(f"[bold]{say(*title)}[/bold]", *lines)
    for finding in findings:
        mark, *words = MARKS[finding.level]
        tell("", f"{mark} [bold]{say(*words)}[/bold] {plain(say(finding.says))}", f"    → {plain(say(finding.remedy))}")
    if not findings:
        tell("", f"[green]✓[/green] {say('nothing to mend', '一切正常')}")


def tell(*lines: str) -> None:
    """In colour where rich is installed and a terminal looks on; a broken installation still gets its report."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        bare = (re.sub(r"(?<!\\)\[/?[a-z]+\]", "", line) for line in lines)
        print(*(line.replace("\\[", "[") for line in bare), sep="\n")
    else:
        Console(highlight=False, soft_wrap=True).print(*lines, sep="\n")


def plain(text: str) -> str:
    """Text whose brackets are no markup: package[extra]."""
    return text.replace("[", "\\[")


def in_words(value: Any) -> str:
    """A fact as a reader wants it: yes and no for switches, a dash for what is not known."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return say("yes", "有") if value else say("no", "无")
    if isinstance(value, list):
        return " ".join(map(str, value)) or "-"
    return say(str(value))
