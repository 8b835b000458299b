"""headwater backtranslate RUN FILE --out pairs.tsv: more pairs to learn from, out of text in the target language alone.

RUN translates the other way: for a model from English to German, train one from German to English first, then give it
German text. Each line becomes a row: what RUN made of it (to be read), and the line itself (to be written).
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

from headwater.cli import inputs, kernels, use
from headwater.cli.language import say
from headwater.cli.outputs import TOGETHER
from headwater.cli.parser import Parser
from headwater.errors import BadInput, BadSetting


def arguments(parser: Parser) -> None:
    parser.add_argument("run", help=say("a run that translates the other way", "反方向的翻译模型的训练目录"))
    told = say(
        "files: text with a sentence a line, or tables (CSV, TSV, JSONL)",
        "文件：每行一句的文本，或表格（CSV、TSV、JSONL）",
    )
    parser.add_argument("files", nargs="+", help=told)
    told = say(
        "the column of a table to read; else the one it was trained on", "读取表格的哪一列；默认为训练时的那一列"
    )
    parser.add_argument("--column", metavar="NAME", help=told)
    parser.add_argument("--out", "-o", required=True, help=say("the table of pairs to write", "写出的句对表"))
    parser.add_argument(
        "--beam", type=int, default=1, help=say("beginnings carried along [1: greedy]", "束宽 [1：贪心]")
    )
    told = say("draw instead: more varied, and often better to learn from", "改为采样：更多样，往往更有用")
    parser.add_argument("--temperature", type=float, default=0.0, help=told)
    parser.add_argument("--seed", type=int, default=0, help=say("of what is drawn", "采样的随机种子"))


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists():
        raise BadSetting(f"--out must be a new file, {out} is there; choose another name")
    if args.temperature and args.beam > 1:
        raise BadSetting("--temperature draws and --beam searches, got both; choose one")
    trained = use.loaded(args, "text-to-text")
    options = inputs.Options(files_only=True, column=args.column)
    given = inputs.inputs_of(args.files, options, "text-to-text", trained.columns)
    kernels.note_missing()
    how = {"temperature": args.temperature, "seed": args.seed} if args.temperature else {}
    part = out.with_name(out.name + ".part")  # the table appears whole
    count = 0
    with part.open("w", encoding="utf-8") as file:
        entries = given.entries()
        while some := list(islice(entries, TOGETHER)):
            lines = [" ".join(entry.text.split()) for entry in some if not entry.blank]
            for line, made in zip(lines, trained(lines, beam=args.beam, **how) if lines else (), strict=True):
                file.write(f"{' '.join(made.split()) or '-'}\t{line}\n")
                count += 1
            print(f"\r{count:,}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if not count:
        part.unlink()
        raise BadInput(f"{args.files[0]} holds no sentence; give text, a sentence a line")
    part.replace(out)
    told = f"{count:,} pairs in {out}; learn from both: headwater train pairs.tsv {out}"
    print(say(told, f"{out} 中有 {count:,} 对；与原有句对一起训练：headwater train pairs.tsv {out}"))
