"""headwater demo: in a minute and a half, a Transformer that reads dates in eleven languages and writes them in any."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from headwater.cli import kernels
from headwater.cli.language import say
from headwater.cli.parser import Parser

EXAMPLES = ("le 15 novembre 2026", ">>zh 15 November 2026", ">>de 2026年11月15日", "3. März 1987")


def arguments(parser: Parser) -> None:
    parser.add_argument("--out", default="runs", help=say("where the run is written [runs]", "结果写在哪里 [runs]"))
    parser.add_argument(
        "--rows", type=int, default=50_000, help=say("dates to learn from [50000]", "用多少条日期训练 [50000]")
    )
    parser.add_argument(
        "--steps", type=int, default=0, help=say("steps, in place of the usual number", "训练步数，代替默认值")
    )
    parser.add_argument(
        "--no-ask", action="store_true", help=say("do not ask for dates at the end", "结束时不请你输入日期")
    )


def run(args: argparse.Namespace) -> int:
    from headwater.training.progress import Show
    from headwater.training.recipes import recipe
    from headwater.training.run import free_name
    from headwater.training.teaching import train

    print(say(*INTRO).format(rows=args.rows), flush=True)
    data = written(Path(args.out) / "dates-data", args.rows)
    folder = free_name("text-to-text", "dates", Path(args.out))
    steps = {"max_steps": args.steps} if args.steps else {}
    chosen = {**recipe("dates"), "valid": [str(data / "valid.tsv")], "out": str(folder), **steps}
    began = time.monotonic()
    trained = train(data / "train.tsv", config=chosen, quiet=True, listeners=[Show(say=say)], say=announce)
    took = time.monotonic() - began
    if trained.outcome.why == "signal":
        print(f"headwater train --resume {folder}")
        return 130
    results(trained, took, data)
    if not args.no_ask and sys.stdin.isatty():
        ask(trained)
    print("\n" + say(*NEXT).format(run=folder, data=data))
    return 0


INTRO = (
    "A Transformer will now learn, from {rows:,} examples and nothing else, to read dates as people write them\n"
    "in eleven languages, and to write them as 2026-11-15 or in another language (>>zh asks for Chinese).\n",
    "现在，一个 Transformer 将只凭 {rows:,} 个例子，学会读懂十一种语言的日期，\n"
    "并写成 2026-11-15 或另一种语言（>>zh 表示写成中文）。\n",
)
NEXT = (
    "What next:\n"
    '  headwater translate {run} ">>ja 7 juillet 2031"      ask it again\n'
    "  headwater train {data}/train.tsv                     the same way with a file of your own\n"
    "  {run}/plots/                                         its curves, and where it looked (attention.png)",
    "接下来：\n"
    '  headwater translate {run} ">>ja 7 juillet 2031"      再问它\n'
    "  headwater train {data}/train.tsv                     换成你自己的文件也一样\n"
    "  {run}/plots/                                         曲线，以及它看向哪里（attention.png）",
)


def announce(lesson: Any) -> None:
    kernels.note_missing()
    s = lesson.settings
    size = sum(p.numel() for p in lesson.model.parameters())
    seconds = f"{s.max_steps * lesson.step_seconds:.0f}"
    print(say(f"{size:,} weights, {s.max_steps} steps, about {seconds} s\n",
              f"{size:,} 个参数，{s.max_steps} 步，约 {seconds} 秒\n"), flush=True)  # fmt: skip


def written(folder: Path, rows: int) -> Path:
    """The data as files, so that it can be looked at and trained on again."""
    from headwater.data.dates import dates

    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), ("valid", 1000), ("test", 1000)):
        text = "".join(f"{pair.source}\t{pair.target}\n" for pair in dates(split, count))
        (folder / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder


def results(trained: Any, took: float, data: Path) -> None:
    from headwater.training.measuring import measured
    from headwater.training.plots import attention

    scores = measured(trained.folder, [str(data / "test.tsv")], beam=1).scores
    print("\n" + say(
        f"On 1,000 dates it has never met: {scores['exact']:.1f} % exactly right, after {took:.0f} s.",
        f"在 1000 个从未见过的日期上：{scores['exact']:.1f} % 完全正确，用时 {took:.0f} 秒。",
    ))  # fmt: skip
    for text in EXAMPLES:
        print(f"   {text}  →  {trained(text, beam=1)}")
    attention(trained, EXAMPLES[1], trained.folder / "plots" / "attention.png")


def ask(trained: Any) -> None:
    print("\n" + say("Type a date in any of these languages (an empty line ends):", "请输入一个日期（空行结束）："))
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        print(f"  {trained(text, beam=1)}")
