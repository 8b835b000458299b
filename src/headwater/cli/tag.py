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
    """Tags other than O stand behind their word."""
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in words)
