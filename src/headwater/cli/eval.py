"""headwater eval RUN FILE …: how good a trained model is on other data, in the measures of its task."""

from __future__ import annotations

import argparse
import json
import shutil
import sys

from headwater.cli import kernels
from headwater.cli.language import say
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    parser.add_argument("run", help=say("the folder of a run", "训练目录"))
    parser.add_argument(
        "files",
        nargs="+",
        help=say("what to measure on, in any layout of train", "评估用的文件，train 能读的格式都可以"),
    )
    parser.add_argument("--columns", metavar="A=B", default="", help=say(
        "where the file names them otherwise than in training: source=en,target=de",
        "列名与训练时不同时，哪一列是什么：source=en,target=de"))  # fmt: skip
    parser.add_argument(
        "--beam", type=int, default=4, help=say("for text to text [4]; 1: greedy", "text-to-text 的束宽 [4]；1 为贪心")
    )
    parser.add_argument("--rows", type=int, default=10**9, help=say("at most so many rows", "最多评估多少行"))
    parser.add_argument("--json", action="store_true", help=say("as JSON", "以 JSON 输出"))


def run(args: argparse.Namespace) -> None:
    from headwater.cli.scores import report_lines
    from headwater.data.telling import filled
    from headwater.training.measuring import measured
    from headwater.training.progress import short

    kernels.note_missing()
    found = measured(args.run, args.files, args.rows, args.beam, args.columns)
    for note in found.notes:
        print(say("note: ", "注意：") + say(note), file=sys.stderr)
    if args.json:
        print(json.dumps({**found.scores, **found.report}, ensure_ascii=False))
        return
    if rows := found.report.get("rows"):
        print(filled(say("rows", "行数"), 12), f"{rows:,}")
    for name, value in found.scores.items():
        print(f"{name:<12} {value:.4g}")
    for line in report_lines(found.report, shutil.get_terminal_size().columns):
        print(line)
    print()
    for sample in found.samples:
        given, said, wanted = (short(sample[name]) for name in ("input", "output", "expected"))
        expected = say("expected", "应为")
        print(f"  {given}  →  {said}" + ("" if said == wanted else f"  ({expected} {wanted})"))
