"""headwater tag RUN "text": every word with its tag."""

from __future__ import annotations

import argparse
from typing import Any

from headwater.cli import use
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    use.arguments(parser)


def run(args: argparse.Namespace) -> None:
    use.answer(args, "tagging", shown)


def shown(words: list[Any]) -> str:
    from headwater.training.exam import tagged_words

    return tagged_words(words)
