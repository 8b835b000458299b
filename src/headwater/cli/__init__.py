"""Command line interface: dispatches the verb, and turns an error into one line on stderr and an exit code.

An entry of VERBS names the module of a verb, its function that adds arguments to a parser and its function that runs.
Only the module of the verb in use is imported, and torch only when it runs, so that --help is quick.

Exit codes: 0 success, 1-8 a Fault (see headwater.errors), 130 interrupted by Ctrl-C, 141 broken pipe.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple

from headwater import __version__
from headwater.cli import kernels
from headwater.cli.parser import COMMON_FLAGS, CommandParser, escape_control, extract_common_flags, normalize_flags
from headwater.errors import BadFile, BadSetting, Fault, Unavailable, is_out_of_memory, nearest
from headwater.i18n import _, language_of, set_language


class Verb(NamedTuple):
    """A command of headwater: its help text, and the module and functions that implement it."""

    help: str
    module: str
    add_arguments: str = "add_arguments"
    run: str = "run"


# Group -> verb -> its implementation.
VERBS: dict[str, dict[str, Verb]] = {
    _("Inspecting models"): {
        "show": Verb(
            _("draw a model with shapes, parameters and costs, before anything is allocated"), "headwater.cli.show"
        ),
        "check": Verb(
            _("check that a model sees neither the future nor the padding, and locate the module that does"),
            "headwater.cli.check",
        ),
        "inspect": Verb(
            _("inspect a model on a text: attention, heads, losses, logit lens, gradients; with figures"),
            "headwater.cli.inspect",
        ),
        "ui": Verb(
            _("a page in the browser: attention, next token, training, architecture; nothing leaves this machine"),
            "headwater.cli.ui",
        ),
    },
    _("Training"): {
        "demo": Verb(_("a model that reads dates in eleven languages, in a minute or two"), "headwater.cli.demo"),
        "train": Verb(_("train on your files; --resume continues a stopped run"), "headwater.cli.train"),
        "eval": Verb(_("evaluate a trained model on other data"), "headwater.cli.eval"),
        "runs": Verb(_("list the runs and their metrics"), "headwater.cli.runs"),
        "translate": Verb(
            _("translate with a model you trained"), "headwater.cli.predict", "add_translate_arguments", "run_translate"
        ),
        "summarize": Verb(
            _("summarize with a model you trained"), "headwater.cli.predict", "add_translate_arguments", "run_summarize"
        ),
        "draw": Verb(_("draw pictures of texts with a model you trained, or with DALL-E mini"), "headwater.cli.draw"),
        "classify": Verb(
            _("classify texts or images with a model you trained"),
            "headwater.cli.predict",
            "add_classify_arguments",
            "run_classify",
        ),
        "match": Verb(_("compare images with texts by a CLIP model, public or trained here"), "headwater.cli.match"),
        "search": Verb(_("find images of a folder by a text or by an image, and duplicates"), "headwater.cli.search"),
        "tag": Verb(
            _("tag every word (named entities) with a model you trained"),
            "headwater.cli.predict",
            "add_tag_arguments",
            "run_tag",
        ),
        "backtranslate": Verb(
            _("back-translation: training pairs from monolingual text"), "headwater.cli.backtranslate"
        ),
        "answer": Verb(
            _("find the span of a text that answers a question"),
            "headwater.cli.predict",
            "add_answer_arguments",
            "run_answer",
        ),
    },
    _("Using models"): {
        "generate": Verb(_("continue a prompt, or generate from a source text"), "headwater.cli.generate"),
        "chat": Verb(_("chat with a model in the terminal"), "headwater.cli.chat"),
        "transcribe": Verb(_("speech to text: transcripts and subtitles of recordings"), "headwater.cli.transcribe"),
        "continue": Verb(
            _("sound that continues a recording, by an AudioLM you trained"),
            "headwater.cli.continuation",
            "add_continue_arguments",
            "run_continue",
        ),
        "speak": Verb(_("text to speech with Bark, in the voice of a token file"), "headwater.cli.speak"),
        "embed": Verb(_("sentence embeddings and their cosine similarities"), "headwater.cli.embed"),
        "convert": Verb(_("convert an old checkpoint (a pickle) to a folder that loads"), "headwater.cli.convert"),
        "adapter": Verb(
            _("show an adapter, merge it into its base, or export it for peft or llama.cpp"), "headwater.cli.adapter"
        ),
        "models": Verb(_("the models that can be installed without a model hub"), "headwater.cli.models"),
    },
    _("Your machine"): {
        "doctor": Verb(_("the environment, its speed, and a remedy for each problem"), "headwater.cli.doctor"),
        "bench": Verb(
            _("training and decoding speed compared with torch.nn.Transformer, and whether the machine was quiet"),
            "headwater.cli.bench",
        ),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    before = set_language(language_of(os.environ))
    try:
        return run_command(argv)
    finally:
        set_language(before)


def run_command(argv: Sequence[str] | None) -> int:
    """Run one command in the language it selects, and turn an error into one line and an exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # an encoding without Chinese must not stop a training run
    try:
        argv = sys.argv[1:] if argv is None else argv
        settings, remaining = extract_common_flags(normalize_flags(argv))
        os.environ.update(settings)  # for child processes too
        set_language(language_of(os.environ))
        code = dispatch(remaining)
        sys.stdout.flush()
        kernels.warn_compile_failed()
        return code
    except SystemExit as stop:  # argparse, after --help
        return stop.code if isinstance(stop.code, int) else 0
    except KeyboardInterrupt:
        return print_message(130, _("stopped by Ctrl-C"))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail again
        return 141
    except Fault as fault:
        return report_error(fault.exit_code, *fault.args[:1])
    except (MemoryError, RuntimeError, ImportError) as error:
        if is_out_of_memory(error):
            return report_error(
                Unavailable.exit_code,
                _("out of memory or threads; close other programs, or use a smaller model or --micro-batch-tokens"),
            )
        if not isinstance(error, ModuleNotFoundError):
            raise  # a bug of headwater
        if (error.name or "headwater").partition(".")[0] == "headwater":
            raise  # a bug of headwater
        return report_error(
            Unavailable.exit_code,
            _("the package {name!r} is not installed; pip install {name}, or see headwater doctor", name=error.name),
        )
    except OSError as error:
        return report_error(
            BadFile.exit_code,
            _("{file}: {reason}", file=error.filename or _("the system"), reason=error.strerror or error),
        )


def report_error(code: int, message: str = "") -> int:
    """Print an error as one line on stderr; returns the exit code."""
    return print_message(code, str(_("error: {text}", text=message)))


def print_message(code: int, message: str) -> int:
    """Print one line on stderr, after the traceback if it was requested; returns the exit code."""
    if os.environ.get("HEADWATER_TRACEBACK") == "1":
        traceback.print_exc()
    print(escape_control(" ".join(str(message).split())), file=sys.stderr)
    return code


def dispatch(argv: list[str]) -> int:
    """Run a verb, or print the help or the version."""
    match argv:
        case [] | ["-h" | "--help", *_]:
            print(overview())
            return 0
        case ["--version", *_]:
            print(f"headwater {__version__}")
            return 0
        case [verb, *rest]:
            return run_verb(verb, rest)
    raise AssertionError("argv is a list")


def run_verb(verb: str, argv: list[str]) -> int:
    """Parse the arguments of a verb and run it; returns its exit code."""
    args = build_parser(verb).parse(argv)
    entry = find_verb(verb)
    run = getattr(importlib.import_module(entry.module), entry.run)
    return run(args) or 0


def build_parser(verb: str) -> CommandParser:
    """The argument parser of a verb."""
    entry = find_verb(verb)
    parser = CommandParser(f"headwater {verb}", str(entry.help))
    add_arguments = getattr(importlib.import_module(entry.module), entry.add_arguments)
    add_arguments(parser)
    parser.add_common_flags()
    return parser


def find_verb(verb: str) -> Verb:
    """The entry of a verb in VERBS; a misspelt one raises BadSetting with the nearest name."""
    verbs = {name: entry for group in VERBS.values() for name, entry in group.items()}
    if verb in verbs:
        return verbs[verb]
    is_flag = verb.startswith("-")
    known = ["--version", *COMMON_FLAGS] if is_flag else list(verbs)
    raise BadSetting(
        _(
            "headwater has no {kind} {verb!r}; {nearest} (all of them: headwater --help)",
            kind=_("flag") if is_flag else _("verb"),
            verb=verb,
            nearest=nearest(verb, known),
        )
    )


def overview() -> str:
    """The help of `headwater` itself: every verb with its help text, by group."""
    lines = [
        _("headwater: one Transformer core, and the family that flows from it"),
        "",
        _("usage: headwater VERB …"),
        "",
    ]
    for heading, verbs in VERBS.items():
        lines += [str(heading), *(f"  {name:<12} {verb.help}" for name, verb in verbs.items()), ""]
    flags = {"--version": _("the version"), **COMMON_FLAGS}
    lines += [_("flags"), *(f"  {flag:<12} {text}" for flag, text in flags.items())]
    lines += ["", _("More about one verb: headwater VERB --help")]
    return "\n".join(map(str, lines))
