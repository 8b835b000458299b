"""headwater summarize RUN "text": what a model trained on pairs of texts makes of it."""

from __future__ import annotations

import argparse

from headwater.cli import translate
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    translate.arguments(parser)


def run(args: argparse.Namespace) -> None:
    translate.text_to_text(args, "summary")
