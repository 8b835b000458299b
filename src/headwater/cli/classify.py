"""headwater classify RUN "text": its label, and how sure the model is."""

from __future__ import annotations

import argparse
from typing import Any

from headwater.cli import use
from headwater.cli.outputs import Shape
from headwater.cli.parser import Parser


def arguments(parser: Parser) -> None:
    use.arguments(parser)


def run(args: argparse.Namespace) -> None:
    use.answer(args, "classification", Shape(("label", "probability"), best, line))


def best(shares: dict[str, Any]) -> tuple[str, float]:
    return next(iter(shares.items()))


def line(shares: dict[str, Any]) -> str:
    label, share = best(shares)
    return f"{label}\t{share:.3f}"
