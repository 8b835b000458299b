"""The command headwater translate RUN "text": predictions of a sequence-to-sequence model; with --out, for files."""

from __future__ import annotations

import argparse

from headwater.cli import common
from headwater.cli.parser import CommandParser
from headwater.i18n import _


def add_arguments(parser: CommandParser) -> None:
    common.add_predict_arguments(parser)
    parser.add_argument("--beam", type=int, default=4, help=_("width of the beam search [4]; 1: greedy"))


def run(args: argparse.Namespace) -> None:
    common.predict_inputs(args, "seq2seq", beam=args.beam)
