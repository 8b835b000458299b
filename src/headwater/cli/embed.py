"""The command headwater embed MODEL "text" …: sentence embeddings, and their cosine similarities."""

from __future__ import annotations

import argparse
import json

from headwater.cli import inputs, kernels
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadInput
from headwater.i18n import _


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("model", help=_("a sentence encoder, such as minilm"))
    help_text = _("texts, files with one text per line, tables (CSV, TSV, JSONL), or - for the standard input")
    parser.add_argument("texts", nargs="*", help=help_text)
    inputs.add_input_arguments(parser)
    parser.add_argument("--json", action="store_true", help=_("the vectors, one JSON object per line"))


def run(args: argparse.Namespace) -> None:
    from headwater.families.load import embed, load

    entries = list(inputs.open_inputs(args.texts, inputs.InputOptions.from_args(args)).entries())
    texts = [entry.text for entry in entries]
    if not texts:
        raise BadInput(_('embed: it needs at least one text, got none; headwater embed minilm "a text" "another"'))
    model = load(args.model)
    kernels.warn_missing()
    vectors = embed(model, texts)
    if args.json:
        for entry, vector in zip(entries, vectors.tolist(), strict=True):
            row = entry.cells or {"text": entry.text}
            print(json.dumps({**row, "vector": [round(x, 7) for x in vector]}, ensure_ascii=False))
        return
    cosines = vectors @ vectors.T
    for row, text in zip(cosines.tolist(), texts, strict=True):
        print(" ".join(f"{cosine:7.4f}" for cosine in row) + f"   {escape_for_terminal(' '.join(text.split())[:60])}")
