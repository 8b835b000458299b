"""headwater answer RUN "question" --text FILE: the stretch of a text that answers it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from headwater.cli import use
from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.errors import NotFound


def arguments(parser: Parser) -> None:
    use.arguments(parser)
    parser.add_argument(
        "--text", default="-", help=say("the file to find the answer in; - is the standard input", "从哪个文件中找答案")
    )


def run(args: argparse.Namespace) -> None:
    from headwater.data.examples import Question

    if args.text != "-" and not Path(args.text).is_file():
        raise NotFound(f"--text must be a file, {args.text} is not there; - reads the standard input")
    context = sys.stdin.read() if args.text == "-" else Path(args.text).read_text(encoding="utf-8")
    trained = use.loaded(args, "answers")
    for question in args.texts:
        print(trained(Question(question, context)))
