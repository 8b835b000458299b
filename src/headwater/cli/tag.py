"""headwater tag RUN "text": every word with its tag."""

from __future__ import annotations

import argparse
from typing import Any

from headwater.cli import use
from headwater.cli.outputs import Shape
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    use.arguments(parser)


def run(args: argparse.Namespace) -> None:
    from headwater.training.exam import tagged_words

    use.answer(args, "tagging", Shape(("tags",), tags, tagged_words))


def tags(words: list[Any]) -> tuple[list[str]]:
    """A tag for every word of the text, in its order."""
    return ([tag for _, tag in words],)
