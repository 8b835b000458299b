"""argparse, taught to speak two languages and to answer a mistake with the nearest known flag."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from headwater.cli.language import LANGUAGES, say
from headwater.errors import BadSetting, nearest

COMMON = {
    "--lang": (
        "language of these texts; else that of HEADWATER_LANG or of the locale",
        "界面语言；默认看 HEADWATER_LANG 或系统区域设置",
    ),
    "--traceback": ("on an error, also show where in the code it arose", "出错时同时显示完整的调用栈"),
    "--help": ("this text", "显示本帮助"),
}


MANY = {None: "{}", "?": "[{}]", "*": "[{} …]", "+": "{} …"}


class Help(argparse.HelpFormatter):
    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        super().add_usage(usage, (), (), say("usage: ", "用法："))

    def format_help(self) -> str:
        """A heading in Chinese ends with a Chinese colon."""
        return re.sub("(?<=[\u4e00-\u9fff]):$", "：", super().format_help(), flags=re.MULTILINE)


class Parser(argparse.ArgumentParser):
    """A mistake is a Fault, and no prefix of a flag is guessed at: --max is not --max-time."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(prog=prog, description=description, add_help=False, allow_abbrev=False, formatter_class=Help)
        self.switches: set[str] = set()
        self._positionals.title = say("what to give", "参数")
        self._optionals.title = say("flags", "选项")

    def add_common(self) -> None:
        """The flags of every verb. main() has already acted on --lang and --traceback; here they are explained."""
        group = self.add_argument_group(say("everywhere", "通用"))
        group.add_argument("--lang", choices=LANGUAGES, help=say(*COMMON["--lang"]))
        group.add_argument("--traceback", action="store_true", help=say(*COMMON["--traceback"]))
        group.add_argument("-h", "--help", action="help", help=say(*COMMON["--help"]))

    def first_line(self) -> str:
        """What must be given; the flags follow below it, each with its meaning."""
        places = [action for action in self._actions if not action.option_strings]
        given = [MANY[action.nargs].format(str(action.metavar or action.dest).upper()) for action in places]  # type: ignore[index]
        return " ".join([self.prog, *given, say("[flags]", "[选项]")])

    def add_switch(self, group: Any, flag: str, dest: str, words: str) -> None:
        """--flag alone means yes; --flag yes and --flag no say it. Another word after it is not its value."""
        group.add_argument(flag, dest=dest, default=None, metavar="yes|no", nargs="?", const="yes", help=words)
        self.switches.add(flag)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        self.usage = self.first_line().replace("%", "%%")
        words = answered(words, self.switches)
        known, unknown = self.parse_known_intermixed_args(words)  # flags may stand between the texts
        for word in unknown[:1]:
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            if word.startswith("-"):
                raise BadSetting(f"{self.prog} has no flag {word!r}; {nearest(word.partition('=')[0], flags)}")
            raise BadSetting(f"{self.prog} takes no further argument, got {word!r}; see {self.prog} --help")
        return known

    def error(self, message: str) -> NoReturn:
        raise BadSetting(f"{self.prog}: {message}; see {self.prog} --help")


YES_OR_NO = ("yes", "no", "true", "false")


def answered(words: Sequence[str], switches: Collection[str]) -> list[str]:
    """A switch followed by yes or no has it as its value; followed by anything else it means yes.

    >>> answered(["--cut", "a.tsv", "--compile", "no", "--", "--cut"], {"--cut", "--compile"})
    ['--cut=yes', 'a.tsv', '--compile=no', '--', '--cut']
    """
    made, left = list[str](), list(words)
    while left and left[0] != "--":
        word = left.pop(0)
        if word in switches:
            word += "=" + (left.pop(0) if left and left[0].lower() in YES_OR_NO else "yes")
        made.append(word)
    return made + left


def spelled_alike(words: Sequence[str]) -> list[str]:
    """Flags may be written with _ or with -; values, and everything after a lone --, stay as they are.

    >>> spelled_alike(["--max_time=a_b", "x_y", "--", "--as_is"])
    ['--max-time=a_b', 'x_y', '--', '--as_is']
    """
    end = list(words).index("--") if "--" in words else len(words)
    flags = [word.partition("=") if word.startswith("--") else ("", "", word) for word in words[:end]]
    return [name.replace("_", "-") + sign + value for name, sign, value in flags] + list(words[end:])


def take_common(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """--lang and --traceback as settings of the environment, wherever they stand, and the other words in their order.

    >>> take_common(["--lang", "zh", "doctor", "--json", "--traceback"])
    ({'HEADWATER_LANG': 'zh', 'HEADWATER_TRACEBACK': '1'}, ['doctor', '--json'])
    """
    settings, rest, left = {}, [], list(words)
    while left and left[0] != "--":
        name, _, value = (word := left.pop(0)).partition("=")
        if word == "--traceback":
            settings["HEADWATER_TRACEBACK"] = "1"
        elif name == "--lang":
            chosen = value or (left.pop(0) if left else "nothing")
            if chosen not in LANGUAGES:
                raise BadSetting(f"--lang must be {' or '.join(LANGUAGES)}, got {chosen!r}; choose one of them")
            settings["HEADWATER_LANG"] = chosen
        else:
            rest.append(word)
    return settings, rest + left
