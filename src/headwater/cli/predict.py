"""The commands headwater translate, summarize, classify, tag and answer: predictions of a trained model.

headwater translate RUN "text"                 the output of a sequence-to-sequence model; with --out, for files
headwater summarize RUN "text"                 the same, in a column "summary" of a table
headwater classify RUN "text"                  the most probable label, with its probability; of photo.jpg too
headwater tag RUN "text"                       a tag for every word
headwater answer RUN "question" --text FILE    the span of the text that answers the question
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headwater.cli import common, images, inputs, kernels, sounds
from headwater.cli.parser import CommandParser, escape_for_terminal
from headwater.errors import BadInput, BadSetting, NotFound
from headwater.i18n import _

# ------------------------------------------------------------------- headwater translate and summarize RUN "text"


def add_translate_arguments(parser: CommandParser) -> None:
    common.add_predict_arguments(parser)
    parser.add_argument("--beam", type=int, default=4, help=_("width of the beam search [4]; 1: greedy"))


def run_translate(args: argparse.Namespace) -> None:
    common.predict_inputs(args, "seq2seq", beam=args.beam)


def run_summarize(args: argparse.Namespace) -> None:
    common.predict_inputs(args, "seq2seq", ("summary",), beam=args.beam)


# ------------------------------------------------------------------------------------- headwater classify RUN "text"


def add_classify_arguments(parser: CommandParser) -> None:
    common.add_predict_arguments(parser)


def run_classify(args: argparse.Namespace) -> None:
    if sounds.looks_like_sounds(args.texts) and not args.as_text:
        sounds.classify_sounds(args.run, args.texts, args.json)
        return
    if images.looks_like_images(args.texts) and not args.as_text:
        images.classify_images(args.run, args.texts, args.json)
        return
    common.predict_inputs(args, "classification")


# ------------------------------------------------------------------------------------------ headwater tag RUN "text"


def add_tag_arguments(parser: CommandParser) -> None:
    common.add_predict_arguments(parser)


def run_tag(args: argparse.Namespace) -> None:
    common.predict_inputs(args, "token-classification")


# ---------------------------------------------------------------------- headwater answer RUN "question" --text FILE


def add_answer_arguments(parser: CommandParser) -> None:
    parser.add_argument("run", help=_("the folder of a run or of a model"))
    help_text = _("one or more questions, each in quotes, or files with one per line")
    parser.add_argument("questions", nargs="+", help=help_text)
    help_text = _("every question is a text, even one that looks like a file name")
    parser.add_argument("--as-text", action="store_true", help=help_text)
    help_text = _("the file to find the answer in; - is the standard input")
    parser.add_argument("--text", default="-", help=help_text)
    parser.add_argument("--json", action="store_true", help=_("one JSON object per line"))


def run_answer(args: argparse.Namespace) -> None:
    from headwater.data.examples import QAExample

    questions = read_questions(args)
    context = _read_context(args.text)
    if not context.strip():
        raise BadInput(_("answer: the text to find the answer in must not be empty; give --text FILE"))
    predictor = common.load_for_task(args, "question-answering")
    kernels.warn_missing()
    for question in questions:
        answer = predictor(QAExample(question, context))
        if args.json:
            print(json.dumps({"input": question, "output": answer}, ensure_ascii=False))
        else:
            print(escape_for_terminal(answer) or _("(no answer)"))


def read_questions(args: argparse.Namespace) -> list[str]:
    """The questions, from the arguments and from files with one question per line."""
    if "-" in args.questions and args.text == "-" and not args.as_text:
        raise BadSetting(
            _("answer: questions and --text cannot both be the standard input; give one of them as a file")
        )
    sources = inputs.open_inputs(args.questions, inputs.InputOptions(as_text=args.as_text))
    if sources.tables:
        raise BadInput(
            _(
                "answer: {path} is a table, which is not supported here; give questions, one per line",
                path=sources.tables[0].path,
            )
        )
    return [entry.text for entry in sources.entries() if not entry.is_blank]


def _read_context(path: str) -> str:
    """The context of the questions: a file, or the standard input."""
    if path == "-":
        return sys.stdin.read().replace("\r\n", "\n")
    if not Path(path).is_file():
        raise NotFound(_("--text must be a file, {path} does not exist; - reads the standard input", path=path))
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            _("{path} must be UTF-8, byte {start} is not; convert it to UTF-8", path=path, start=error.start)
        ) from None
