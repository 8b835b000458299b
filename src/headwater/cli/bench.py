"""headwater bench: how fast this machine learns and writes, beside torch.nn.Transformer, and whether it was quiet."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from headwater.cli.language import say
from headwater.errors import BadSetting, nearest


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    works = say(
        "a: encoder-decoder 256/3+3, c: GPT 384/6, small (a c)",
        "a：编码器-解码器 256/3+3，c：GPT 384/6，small：小模型（a c）",
    )
    add("--work", nargs="+", default=["a", "c"], metavar="W", help=works)
    add("--rounds", type=int, default=5, metavar="N", help=say("repeats, in turn (5)", "交替重复次数（5）"))
    add("--model", metavar="MODEL", help=say("also the decoding speed of this model", "同时测这个模型的解码速度"))
    add("--tokens", type=int, default=64, metavar="N", help=say("tokens to write (64)", "写多少词元（64）"))
    add("--json", action="store_true", help=say("the report as JSON", "以 JSON 输出"))
    add("--out", metavar="FOLDER", help=say("write bench.json and bench.md there", "写入 bench.json 和 bench.md"))


def run(args: argparse.Namespace) -> None:
    if args.rounds < 1 or args.tokens < 2:
        raise BadSetting(f"bench needs --rounds of 1 and --tokens of 2 at least, got {args.rounds} and {args.tokens}")
    from headwater.inspection.bench import measured
    from headwater.inspection.steps import WORKS

    for name in args.work:
        if name not in WORKS:
            raise BadSetting(f"--work: no work is called {name!r}; {nearest(name, WORKS)}")
    found = measured(args.work, args.rounds, args.model, args.tokens)
    if args.out:
        folder = Path(args.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "bench.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
        (folder / "bench.md").write_text(table(found) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2) if args.json else table(found))


def table(found: dict[str, Any]) -> str:
    """Markdown, which a terminal shows well too."""
    lines = [f"| {say('limit', '极限')} | |", "|---|---|", *(f"| {n} | {v:g} |" for n, v in found["limits"].items())]
    heads = (
        say("training step", "训练一步"),
        "headwater ms",
        "torch.nn.Transformer ms",
        say("× as fast", "快几倍"),
        say("of matmul peak", "占矩阵乘峰值"),
    )
    lines += ["", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for name, work in found["training"].items():
        cells = [middle(figures) for figures in work["ms a step"].values()]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {work['times as fast']:.2f} | {work['share of matmul peak']:.0%} |"
        )
    for model, figures in found.get("decoding", {}).items():
        lines += ["", f"| {model} | |", "|---|---|", *(f"| {name} | {middle(f)} |" for name, f in figures.items())]
    return "\n".join([*lines, "", verdict(found)])


def middle(figures: dict[str, float]) -> str:
    spread = f" [{figures['low']:.1f}..{figures['high']:.1f}]" if figures["low"] < figures["high"] else ""
    return f"{figures['median']:.1f}{spread}"


def verdict(found: dict[str, Any]) -> str:
    how = say(
        f"rounds in turn: {found['rounds']}, threads: {found['threads']}; medians [quartiles]",
        f"交替 {found['rounds']} 轮，{found['threads']} 线程：中位数 [四分位]",
    )
    if found["quiet"] is None:
        return how + say("; this system does not tell what else was running", "；此系统无法得知是否有其他负载")
    share = f"{found['others']:.0%}"
    if found["quiet"]:
        return how + say(f"; the machine was quiet (others took {share})", f"；机器空闲（其他进程占 {share}）")
    return how + say(
        f"; the machine was BUSY: others took {share} of it, do not trust these figures",
        f"；机器繁忙：其他进程占 {share}，这些数字不可信",
    )
