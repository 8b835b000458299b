"""The command headwater demo: trains a model that translates dates between eleven languages, in 90 seconds."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from headwater.cli import kernels
from headwater.cli.parser import CommandParser
from headwater.i18n import _

if TYPE_CHECKING:
    from headwater.training.predict import Predictor
    from headwater.training.setup import TrainSetup

EXAMPLES = ("le 15 novembre 2026", _(">>zh 15 November 2026"), "3. März 1987")


def add_arguments(parser: CommandParser) -> None:
    parser.add_argument("--out", default="runs", help=_("folder to write the run to [runs]"))
    parser.add_argument("--rows", type=int, default=50_000, help=_("dates to train on [50000]"))
    parser.add_argument("--steps", type=int, default=0, help=_("number of steps, instead of the default"))
    parser.add_argument("--no-ask", action="store_true", help=_("do not ask for dates at the end"))


def run(args: argparse.Namespace) -> int:
    from headwater.training.api import train
    from headwater.training.loggers import ProgressBar
    from headwater.training.recipes import recipe
    from headwater.training.run_dir import unused_path
    from headwater.training.state import StopReason

    print(introduction(args.rows), flush=True)
    data = write_data(Path(args.out) / "dates-data", args.rows)
    folder = unused_path("seq2seq", "dates", Path(args.out))
    steps = {"max_steps": args.steps} if args.steps else {}
    config = {**recipe("dates"), "valid": [str(data / "valid.tsv")], "out": str(folder), **steps}
    start_time = time.monotonic()
    predictor = train(data / "train.tsv", config=config, quiet=True, callbacks=[ProgressBar()], on_setup=print_plan)
    seconds = time.monotonic() - start_time
    assert predictor.result is not None
    if predictor.result.stop_reason is StopReason.INTERRUPTED:
        print(f"headwater train --resume {folder}")
        return 130
    print_results(predictor, seconds, data)
    if not args.no_ask and sys.stdin.isatty():
        ask_for_dates(predictor)
    print("\n" + next_steps(folder, data))
    return 0


def introduction(rows: int) -> str:
    """The first lines of the output."""
    return _(
        "A Transformer will now learn, from {rows:,} examples and nothing else, to read dates as people write them\n"
        "in eleven languages, and to write them as 2026-11-15 or in another language (>>zh asks for Chinese).\n",
        rows=rows,
    )


def next_steps(run: Path, data: Path) -> str:
    """The commands to try next."""
    return _(
        'What next:\n  headwater translate {run} ">>ja 7 juillet 2031"      translate another date\n  '
        "headwater train {data}/train.tsv                     train the same way on a file of your own\n  "
        "{run}/plots/                                         loss curves, and cross-attention "
        "(attention.png)",
        run=run,
        data=data,
    )


def print_plan(setup: TrainSetup) -> None:
    """Print the size of the model and the expected time."""
    kernels.warn_missing()
    size = sum(p.numel() for p in setup.model.parameters())
    max_steps = setup.config.max_steps
    seconds = f"{max_steps * setup.step_seconds:.0f}"
    print(
        _(
            "{size:,} parameters, {max_steps} steps, about {seconds} s\n",
            size=size,
            max_steps=max_steps,
            seconds=seconds,
        ),
        flush=True,
    )


def write_data(folder: Path, rows: int) -> Path:
    """Write the dataset as TSV files, so that it can be read and trained on again."""
    from headwater.data.dates import dates_dataset

    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", rows), ("valid", 1000), ("test", 1000)):
        text = "".join(f"{pair.source}\t{pair.target}\n" for pair in dates_dataset(split, count))
        (folder / f"{split}.tsv").write_text(text, encoding="utf-8")
    return folder


def print_results(predictor: Predictor, seconds: float, data: Path) -> None:
    """Print the exact-match rate on the test split and some examples, and plot the cross-attention of one."""
    from headwater.training.evaluate import evaluate_files
    from headwater.training.plots import plot_cross_attention

    metrics = evaluate_files(predictor.folder, [str(data / "test.tsv")], beam=1).metrics
    print(
        "\n"
        + _(
            "On 1,000 dates that are not in its data: {exact:.1f} % exactly right, after {seconds:.0f} s.",
            exact=metrics["exact"],
            seconds=seconds,
        )
    )
    for text in EXAMPLES:
        print(f"   {text}  →  {predictor(text, beam=1)}")
    plot_cross_attention(predictor, EXAMPLES[1], predictor.folder / "plots" / "attention.png")


def ask_for_dates(predictor: Predictor) -> None:
    """Read dates from the terminal and print their translations, until an empty line."""
    print("\n" + _("Type a date in any of these languages (an empty line ends):"))
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not text:
            return
        print(f"  {predictor(text, beam=1)}")
