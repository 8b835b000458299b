"""The command headwater runs: the training runs below a folder, with their state and best metrics."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.cli.parser import CommandParser
from headwater.i18n import _

STATES = {
    "finished": _("finished"),
    "early_stopping": _("stopped early"),
    "time_limit": _("time limit reached"),
    "interrupted": _("stopped (signal)"),
    "diverged": _("stopped (NaN)"),
    "unfinished": _("unfinished"),
}
STATE_WIDTH = 18  # terminal columns of the longest state
NOT_METRICS = ("step", "split", "best", "num_examples", "time")


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help=_("folder of the runs [runs]"))
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))


def run(args: argparse.Namespace) -> None:
    from headwater.i18n import padded

    summaries = [run_summary(path.parent) for path in sorted(Path(args.folder).rglob("config.yaml"))]
    if args.json:
        for summary in summaries:
            print(json.dumps(summary, ensure_ascii=False))
        return
    if not summaries:
        print(_("no runs in {folder}; headwater train FILE starts one", folder=args.folder))
    for summary in summaries:
        metrics = "  ".join(f"{name} {value:.4g}" for name, value in summary["best_metrics"].items())
        state = padded(str(STATES.get(summary["state"], summary["state"])), STATE_WIDTH)
        print(f"{summary['run']:<40} {state} {_('step')} {summary['step']:<8} {metrics}")


def run_summary(folder: Path) -> dict[str, Any]:
    """The state, step and best metrics of a run, from metrics.jsonl alone: fast, and safe while it trains."""
    from headwater.training.loggers import read_jsonl

    lines = read_jsonl(folder / "metrics.jsonl")
    best = [line for line in lines if line.get("split") in ("valid", "final") and line.get("best")]
    ends = [line["stop_reason"] for line in lines[-1:] if "stop_reason" in line]
    best_line = best[-1] if best else {}
    metrics = {name: value for name, value in best_line.items() if name not in NOT_METRICS and value is not None}
    step = max((line["step"] for line in lines), default=0)
    return {"run": str(folder), "state": ends[0] if ends else "unfinished", "step": step, "best_metrics": metrics}
