"""The command headwater backtranslate RUN FILE --out pairs.tsv: back-translation of text in the target language.

Back-translation (Sennrich et al. 2016) generates training pairs from monolingual text. RUN translates in the reverse
direction: for a model from English to German, first train one from German to English, then give it German text. Each
line becomes a row: its translation (the source) and the line itself (the target).
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

from headwater.cli import common, inputs, kernels
from headwater.cli.outputs import BATCH_SIZE
from headwater.cli.parser import CommandParser
from headwater.errors import BadInput, BadSetting
from headwater.i18n import _


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("run", help=_("a run that translates the other way"))
    help_text = _("text files with one sentence per line, or tables (CSV, TSV, JSONL)")
    parser.add_argument("files", nargs="+", help=help_text)
    help_text = _("the table column to read; default: the one the model was trained on")
    parser.add_argument("--column", metavar="NAME", help=help_text)
    parser.add_argument("--out", "-o", required=True, help=_("the table of pairs to write"))
    parser.add_argument("--beam", type=int, default=1, help=_("width of the beam search [1: greedy]"))
    help_text = _("sample instead: more varied, and often better for training")
    parser.add_argument("--temperature", type=float, default=0.0, help=help_text)
    parser.add_argument("--seed", type=int, default=0, help=_("random seed of the sampling"))


def run(args: argparse.Namespace) -> None:
    out = Path(args.out)
    if out.exists():
        raise BadSetting(_("--out must be a new file, {out} already exists; choose another name", out=out))
    if args.temperature and args.beam > 1:
        raise BadSetting(_("--temperature samples and --beam searches, got both; choose one"))
    predictor = common.load_for_task(args, "seq2seq")
    options = inputs.InputOptions(files_only=True, column=args.column)
    sources = inputs.open_inputs(args.files, options, "seq2seq", predictor.columns)
    kernels.warn_missing()
    sampling = {"temperature": args.temperature, "seed": args.seed} if args.temperature else {}
    part = out.with_name(out.name + ".part")  # renamed when it is complete
    count = 0
    with part.open("w", encoding="utf-8") as file:
        entries = sources.entries()
        while batch := list(islice(entries, BATCH_SIZE)):
            lines = [" ".join(entry.text.split()) for entry in batch if not entry.is_blank]
            translations = predictor(lines, beam=args.beam, **sampling) if lines else []
            for line, translation in zip(lines, translations, strict=True):
                file.write(f"{' '.join(translation.split()) or '-'}\t{line}\n")
            count += len(lines)
            print(f"\r{count:,}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if not count:
        part.unlink()
        raise BadInput(_("{file} contains no sentence; give a text with one sentence per line", file=args.files[0]))
    part.replace(out)

    print(_("{count:,} pairs in {out}; train on both: headwater train pairs.tsv {out}", count=count, out=out))
