"""headwater runs: the runs below a folder, where each stands and how good its best model is."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.cli.language import say
from headwater.cli.parser import Parser

STATES = {
    "finished": ("finished", "已完成"),
    "no better": ("stopped early", "已早停"),
    "time": ("out of time", "时间用完"),
    "signal": ("stopped (signal)", "已中断（信号）"),
    "bad steps": ("stopped (NaN)", "已停止（NaN）"),
    "unfinished": ("unfinished", "未完成"),
}
WIDTH = 16  # columns of the longest state


def arguments(parser: Parser) -> None:
    parser.add_argument("folder", nargs="?", default="runs", help=say("where to look [runs]", "在哪里查找 [runs]"))
    parser.add_argument("--json", action="store_true", help=say("a JSON object a line", "每行一个 JSON"))


def run(args: argparse.Namespace) -> None:
    from headwater.i18n import filled

    found = [about(path.parent) for path in sorted(Path(args.folder).rglob("config.yaml"))]
    if args.json:
        for line in found:
            print(json.dumps(line, ensure_ascii=False))
        return
    if not found:
        print(
            say(
                f"no runs in {args.folder}; headwater train FILE begins one",
                f"{args.folder} 中没有训练；用 headwater train 开始",
            )
        )
    for line in found:
        scores = "  ".join(f"{name} {value:.4g}" for name, value in line["scores"].items())
        state = filled(say(*STATES.get(line["state"], (line["state"], line["state"]))), WIDTH)
        print(f"{line['run']:<40} {state} {say('step', '步')} {line['step']:<8} {scores}")


def about(folder: Path) -> dict[str, Any]:
    """From metrics.jsonl alone, which is quick and safe while the run goes on."""
    from headwater.training.journals import read_lines

    lines = read_lines(folder / "metrics.jsonl")
    best = [line for line in lines if line.get("split") in ("valid", "final") and line.get("best")]
    ends = [line["stopped"] for line in lines[-1:] if "stopped" in line]
    leave_out = ("step", "split", "best", "rows", "time")
    scores = {k: v for k, v in (best[-1] if best else {}).items() if k not in leave_out and v is not None}
    steps = max((line["step"] for line in lines), default=0)
    return {"run": str(folder), "state": ends[0] if ends else "unfinished", "step": steps, "scores": scores}
