"""headwater answer RUN "question" --text FILE: the stretch of a text that answers it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headwater.cli import inputs, kernels, use
from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.cli.terminal import for_terminal
from headwater.errors import BadInput, BadSetting, NotFound


def arguments(parser: Parser) -> None:
    parser.add_argument("run", help=say("the folder of a run or of a model", "训练目录或模型目录"))
    told = say(
        "one or more, each in quotes, or files with one a line", "一个或多个问题，各加引号；或每行一个问题的文件"
    )
    parser.add_argument("questions", nargs="+", help=told)
    told = say(
        "every question is a text, even one that looks like a file name", "所有问题都当作文本，即使看起来像文件名"
    )
    parser.add_argument("--as-text", action="store_true", help=told)
    told = say("the file to find the answer in; - is the standard input", "从哪个文件中找答案；- 表示标准输入")
    parser.add_argument("--text", default="-", help=told)
    parser.add_argument("--json", action="store_true", help=say("a JSON object a line", "每行输出一个 JSON"))


def run(args: argparse.Namespace) -> None:
    from headwater.data.examples import Question

    args.questions = questions_of(args)
    context = _text(args.text)
    if not context.strip():
        raise BadInput("answer: there must be a text to find the answer in, it is empty; give --text FILE")
    trained = use.loaded(args, "answers")
    kernels.note_missing()
    for question in args.questions:
        found = trained(Question(question, context))
        shown = for_terminal(found) or say("(no answer)", "（无答案）")
        print(json.dumps({"input": question, "output": found}, ensure_ascii=False) if args.json else shown)


def questions_of(args: argparse.Namespace) -> list[str]:
    """The questions, some of them perhaps in files with one a line."""
    if "-" in args.questions and args.text == "-" and not args.as_text:
        raise BadSetting("answer: questions and --text can not both be the standard input; give one of them as a file")
    given = inputs.inputs_of(args.questions, inputs.Options(as_text=args.as_text))
    if given.tables:
        raise BadInput(f"answer: {given.tables[0].path} is a table, which is not read here; give questions, one a line")
    return [entry.text for entry in given.entries() if not entry.blank]


def _text(path: str) -> str:
    if path == "-":
        return sys.stdin.read().replace("\r\n", "\n")
    if not Path(path).is_file():
        raise NotFound(f"--text must be a file, {path} is not there; - reads the standard input")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} must be UTF-8, byte {error.start} is not; write it anew in UTF-8") from None
