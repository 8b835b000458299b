"""Argument parser of the command line: bilingual help, common and sampling flags, escaping of terminal output."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from headwater.errors import BadSetting, nearest
from headwater.i18n import LANGUAGES, _, join

COMMON_FLAGS = {
    "--lang": _("language of help and messages; default: HEADWATER_LANG, else the locale"),
    "--traceback": _("on an error, also print the traceback"),
    "--help": _("show this help"),
}


def _translated(text: str) -> str:
    """A text of argparse in the current language."""
    return str(_(text))


argparse._ = _translated  # type: ignore[attr-defined]

NARGS_FORMATS = {None: "{}", "?": "[{}]", "*": "[{} …]", "+": "{} …"}


class BilingualHelpFormatter(argparse.HelpFormatter):
    """argparse's help in the current language, with a usage line of positional arguments only."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, (), (), _("usage: "))

    def format_help(self) -> str:
        """The help text; a Chinese heading ends with a Chinese colon."""
        return re.sub("(?<=[\u4e00-\u9fff]):$", "：", super().format_help(), flags=re.MULTILINE)


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are Faults with the nearest known flag. A flag is never abbreviated."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=BilingualHelpFormatter,
        )
        self.bool_flags: set[str] = set()
        self._positionals.title = _("arguments")
        self._optionals.title = _("flags")

    def add_common_flags(self) -> None:
        """Add the flags of every verb. main() has already acted on --lang and --traceback; here they get their help."""
        group = self.add_argument_group(_("common flags"))
        group.add_argument("--lang", choices=LANGUAGES, help=str(COMMON_FLAGS["--lang"]))
        group.add_argument("--traceback", action="store_true", help=str(COMMON_FLAGS["--traceback"]))
        group.add_argument("-h", "--help", action="help", help=str(COMMON_FLAGS["--help"]))

    def usage_line(self) -> str:
        """The usage line: the positional arguments, and [flags]."""
        words = [self.prog]
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest).upper()
                words.append(NARGS_FORMATS[action.nargs].format(name))  # type: ignore[index]
        return f"{' '.join(words)} {_('[flags]')}"

    def add_bool_flag(self, group: Any, flag: str, dest: str, help_text: str) -> None:
        """Add a boolean flag: --flag and --flag yes are true, --flag no is false. Other words are not its value."""
        group.add_argument(flag, dest=dest, default=None, metavar="yes|no", nargs="?", const="yes", help=help_text)
        self.bool_flags.add(flag)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the arguments; flags may be anywhere between them. Raises BadSetting for unknown ones."""
        self.usage = self.usage_line().replace("%", "%%")
        argv = expand_bool_flags(argv, self.bool_flags)
        known, unknown = self.parse_known_intermixed_args(argv)
        for word in unknown[:1]:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            if word.startswith("-"):
                raise BadSetting(
                    _(
                        "{prog} has no flag {word!r}; {nearest}",
                        prog=self.prog,
                        word=word,
                        nearest=nearest(word.partition("=")[0], flags),
                    )
                )
            raise BadSetting(
                _("{prog} takes no further argument, got {word!r}; see {prog} --help", prog=self.prog, word=word)
            )
        return known

    def error(self, message: str) -> NoReturn:
        raise BadSetting(_("{prog}: {text}; see {prog} --help", prog=self.prog, text=message))


BOOL_WORDS = ("yes", "no", "true", "false")


def expand_bool_flags(argv: Sequence[str], bool_flags: Collection[str]) -> list[str]:
    """A boolean flag followed by yes or no has it as its value; followed by anything else it means yes.

    >>> expand_bool_flags(["--truncate", "a.tsv", "--compile", "no", "--", "--truncate"], {"--truncate", "--compile"})
    ['--truncate=yes', 'a.tsv', '--compile=no', '--', '--truncate']
    """
    expanded: list[str] = []
    remaining = list(argv)
    while remaining and remaining[0] != "--":
        word = remaining.pop(0)
        if word in bool_flags:
            has_value = bool(remaining) and remaining[0].lower() in BOOL_WORDS
            word += "=" + (remaining.pop(0) if has_value else "yes")
        expanded.append(word)
    return expanded + remaining


def normalize_flags(argv: Sequence[str]) -> list[str]:
    """Flags with - in place of _; values, and everything after a lone --, stay as they are.

    >>> normalize_flags(["--max_time=a_b", "x_y", "--", "--as_is"])
    ['--max-time=a_b', 'x_y', '--', '--as_is']
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    flags = [word.partition("=") if word.startswith("--") else ("", "", word) for word in argv[:end]]
    return [name.replace("_", "-") + equals + value for name, equals, value in flags] + list(argv[end:])


def extract_common_flags(argv: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """--lang and --traceback, at any position, as environment variables; and the other words in order.

    >>> extract_common_flags(["--lang", "zh", "doctor", "--json", "--traceback"])
    ({'HEADWATER_LANG': 'zh', 'HEADWATER_TRACEBACK': '1'}, ['doctor', '--json'])
    """
    settings: dict[str, str] = {}
    remaining: list[str] = []
    left = list(argv)
    while left and left[0] != "--":
        word = left.pop(0)
        name, _unused, value = word.partition("=")
        if word == "--traceback":
            settings["HEADWATER_TRACEBACK"] = "1"
        elif name == "--lang":
            chosen = value or (left.pop(0) if left else "nothing")
            if chosen not in LANGUAGES:
                raise BadSetting(
                    _(
                        "--lang must be {languages}, got {chosen!r}; choose one of them",
                        languages=join(_(" or "), LANGUAGES),
                        chosen=chosen,
                    )
                )
            settings["HEADWATER_LANG"] = chosen
        else:
            remaining.append(word)
    return settings, remaining + left


# ------------------------------------------------------------------------------------- escaping of terminal output

# C0 and C1 control characters (among them ESC, which starts every terminal command) except tab and newline; and the
# bidirectional marks, which can make a line read as another.
UNSAFE_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_control(text: str) -> str:
    r"""Escape each unsafe character as \xNN or \uNNNN, one by one, so that a stream may be escaped in pieces.

    >>> escape_control("red: \x1b[31m 你好")
    'red: \\x1b[31m 你好'
    """
    return UNSAFE_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def escape_for_terminal(text: str) -> str:
    """Escape control characters if the output is a terminal; a file or a pipe gets the text unchanged."""
    return escape_control(text) if sys.stdout.isatty() else text


# ---------------------------------------------------------------------------- sampling flags of generate and chat


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling parameter."""
    group = parser.add_argument_group(_("sampling (default: greedy)"))
    flags = {
        "temperature": (float, _("0 is greedy, higher more varied; 0.7 is usual")),
        "top-k": (int, _("only the K most probable tokens")),
        "top-p": (float, _("only the most probable tokens whose probabilities sum to this")),
        "min-p": (float, _("only tokens with at least this fraction of the highest probability")),
        "repetition-penalty": (float, _("above 1: tokens of prompt and output become less probable")),
        "no-repeat-ngram-size": (int, _("no n-gram of N tokens twice")),
    }
    for name, (kind, help_text) in flags.items():
        group.add_argument(f"--{name}", type=kind, metavar="N", help=help_text)
    help_text = _("the same seed gives the same text")
    group.add_argument("--seed", type=int, default=0, metavar="N", help=help_text)
    help_text = _("maximum number of output tokens (256, or what fits)")
    group.add_argument("--max-tokens", type=int, metavar="N", help=help_text)
    help_text = _("end the output before this text; may be repeated")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=help_text)
    help_text = _("let control characters of the output act on the terminal")
    group.add_argument("--raw", action="store_true", help=help_text)


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags as keyword arguments of generate()."""
    names = (
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "seed",
        "max_tokens",
        "stop",
    )
    return {name: getattr(args, name) for name in names}
