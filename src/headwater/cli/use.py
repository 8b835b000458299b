"""What the verbs that use a trained model share: their flags, the model of a run, and answering all that was given."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from headwater.cli import inputs, kernels
from headwater.cli.language import say
from headwater.cli.outputs import ResumableFile, Shape, print_answers, writer_of
from headwater.cli.parser import Parser
from headwater.cli.terminal import for_terminal
from headwater.errors import BadInput

VERB_OF = {"text-to-text": "translate", "classification": "classify", "tagging": "tag", "answers": "answer"}


def arguments(parser: Parser) -> None:
    parser.add_argument("run", help=say("the folder of a run or of a model", "训练目录或模型目录"))
    told = say(
        "texts, files with one text a line, tables (CSV, TSV, JSONL), or - for the standard input",
        "文本、每行一条的文件、表格（CSV、TSV、JSONL），或 - 表示标准输入",
    )
    parser.add_argument("texts", nargs="*", help=told)
    inputs.arguments(parser)
    told = say("a JSON object a line", "每行输出一个 JSON")
    parser.add_argument("--json", action="store_true", help=told)
    told = say("write to this new file; stopped, the same command goes on", "写入这个新文件；中断后重复同一命令即续写")
    parser.add_argument("--out", "-o", metavar="FILE", help=told)


def loaded(args: argparse.Namespace, task: str) -> Any:
    """The model of a run, if it was trained for this task."""
    from headwater.training.use import load_run

    trained = load_run(args.run)
    if trained.task != task:
        right = f"headwater {VERB_OF.get(trained.task, 'generate')}"
        raise BadInput(f"{args.run} was trained for {trained.task}, this verb is for {task}; use {right}")
    return trained


def answer(args: argparse.Namespace, task: str, shape: Shape, **how: Any) -> None:
    """Answer every text: a line each, or the table they stand in with columns added."""
    trained = loaded(args, task)
    given = inputs.inputs_of(args.texts, inputs.Options.of(args), task, trained.columns)
    writer = writer_of(given, shape, args.json)
    file = None
    if args.out is not None:
        asked = {name: getattr(args, name) for name in ("run", "texts", "as_text", "column", "format", "json")}
        file = ResumableFile(Path(args.out), {**asked, **how})
    kernels.note_missing()

    def ask(texts: Any) -> Any:
        return trained(texts, **how)

    if file is None:
        print_answers(given, writer, ask, for_terminal)
        return
    count = file.write(given.entries(), writer, ask)
    print(say(f"{count:,} rows in {args.out}", f"{args.out} 中有 {count:,} 行"), file=sys.stderr)
