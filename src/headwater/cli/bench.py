"""The command headwater bench: training and decoding speed compared with torch.nn.Transformer, and the CPU load."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.errors import BadSetting, nearest
from headwater.i18n import _


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    workloads_help = _("a: encoder-decoder 256/3+3, c: GPT 384/6, small (a c)")
    add("--workload", nargs="+", default=["a", "c"], metavar="W", help=workloads_help)
    add("--rounds", type=int, default=5, metavar="N", help=_("interleaved rounds (5)"))
    add("--model", metavar="MODEL", help=_("also the decoding speed of this model"))
    add("--tokens", type=int, default=64, metavar="N", help=_("tokens to generate (64)"))
    add("--json", action="store_true", help=_("the report as JSON"))
    add("--out", metavar="FOLDER", help=_("write bench.json and bench.md into this folder"))


def run(args: argparse.Namespace) -> None:
    if args.rounds < 1 or args.tokens < 2:
        raise BadSetting(
            _(
                "bench: --rounds must be at least 1 and --tokens at least 2, got {rounds} and {tokens}",
                rounds=args.rounds,
                tokens=args.tokens,
            )
        )
    from headwater.bench import WORKLOADS, run_benchmarks

    for name in args.workload:
        if name not in WORKLOADS:
            raise BadSetting(
                _("--workload: there is no workload {name!r}; {nearest}", name=name, nearest=nearest(name, WORKLOADS))
            )
    report = run_benchmarks(args.workload, args.rounds, args.model, args.tokens)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
        (folder / "bench.md").write_text(markdown_table(report) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2) if args.json else markdown_table(report))


def markdown_table(report: dict[str, Any]) -> str:
    """The benchmark report as Markdown tables."""
    lines = [f"| {_('limit')} | |", "|---|---|", *(f"| {n} | {v:g} |" for n, v in report["limits"].items())]
    heads = (_("training step"), "headwater ms", "torch.nn.Transformer ms", _("× as fast"), _("of matmul peak"))
    lines += ["", "| " + " | ".join(map(str, heads)) + " |", "|---" * len(heads) + "|"]
    for name, result in report["training"].items():
        cells = [format_median(stats) for stats in result["step_ms"].values()]
        ratios = f"{result['speedup']:.2f} | {result['matmul_peak_fraction']:.0%}"
        lines.append(f"| {name} | {' | '.join(cells)} | {ratios} |")
    for model, figures in report.get("decoding", {}).items():
        lines += [
            "",
            f"| {model} | |",
            "|---|---|",
            *(f"| {name} | {format_median(f)} |" for name, f in figures.items()),
        ]
    return "\n".join(map(str, [*lines, "", verdict(report)]))


def format_median(stats: dict[str, float]) -> str:
    """The median with its quartiles."""
    quartiles = f" [{stats['low']:.1f}..{stats['high']:.1f}]" if stats["low"] < stats["high"] else ""
    return f"{stats['median']:.1f}{quartiles}"


def verdict(report: dict[str, Any]) -> str:
    """How the figures were measured, and whether other processes disturbed them."""
    method = _(
        "{rounds} interleaved rounds, {threads} threads; medians [quartiles]",
        rounds=report["rounds"],
        threads=report["threads"],
    )
    if report["quiet"] is None:
        return method + _("; the load of other processes is unknown on this system")
    other_load = f"{report['other_load']:.0%}"
    if report["quiet"]:
        return method + _("; the machine was quiet (other processes used {load} of the CPUs)", load=other_load)
    return method + _(
        "; the machine was BUSY: other processes used {load} of the CPUs, do not trust these figures", load=other_load
    )
