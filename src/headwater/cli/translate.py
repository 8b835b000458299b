"""headwater translate RUN "text": what a model trained on pairs of texts makes of it; with --out, whole files."""

from __future__ import annotations

import argparse

from headwater.cli import use
from headwater.cli.language import say
from headwater.cli.outputs import Shape
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    use.arguments(parser)
    parser.add_argument(
        "--beam", type=int, default=4, help=say("beginnings carried along [4]; 1: greedy", "束宽 [4]；1 为贪心")
    )


def run(args: argparse.Namespace) -> None:
    text_to_text(args, "translation")


def text_to_text(args: argparse.Namespace, column: str) -> None:
    """column: what the added column of a table is called."""
    use.answer(args, "text-to-text", Shape((column,), lambda text: (text,), str), beam=args.beam)
