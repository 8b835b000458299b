"""Every command in README and docs exists: the real parser takes it, and scripts, flags and files are there."""

from __future__ import annotations

import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from headwater.cli import VERBS, build_parser, find_verb
from headwater.cli.parser import extract_common_flags, normalize_flags
from headwater.errors import Fault
from headwater.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "headwater"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
OPERATORS = {"|", ">", ">>", "<", "&&", ";", "&"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
INLINE = re.compile(r"`([^`\n]+)`")
# Flags of other programs that the pages name: torchrun, pip, the shell's own.
OTHER_FLAGS = {"--nproc-per-node", "--max-restarts", "--nnodes", "--rdzv-endpoint", "--rdzv-backend", "--version"}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())


class Command(NamedTuple):
    line: str
    words: list[str]


def split_commands(line: str) -> list[Command]:
    """The commands of a line of shell, without comments, pipes and redirections.

    >>> [command.words for command in split_commands("cat a.txt | headwater translate RUN > out  # a comment")]
    [['cat', 'a.txt'], ['headwater', 'translate', 'RUN'], ['out']]
    """
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|><&;")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    for word in lexer:
        if word in OPERATORS:
            commands.append([])
        else:
            commands[-1].append(word)
    return [Command(line, words) for words in commands if words]


def printed_commands(text: str) -> list[Command]:
    """The commands of shell blocks, and those after a $ in other blocks."""
    commands = []
    for language, block in FENCE.findall(text):
        for line in block.splitlines():
            if language == "sh" and line.strip():
                commands += split_commands(line)
            elif language == "text" and line.startswith("$ "):
                commands += split_commands(line[2:])
    return commands


def headwater_arguments(words: list[str]) -> list[str] | None:
    """The arguments of headwater, however it is started: headwater, python -m headwater, torchrun -m headwater."""
    if words[0] == "headwater":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["headwater"]:
        return words[words.index("-m") + 2 :]
    return None


def parse(arguments: list[str]) -> str | None:
    """Parse the arguments of headwater with the parser of the verb; the error, or None."""
    try:
        _, rest = extract_common_flags(normalize_flags(arguments))
        if not rest or rest[0] in ("--help", "--version"):
            return None
        find_verb(rest[0])
        if "--help" in rest:
            return None
        parsed = build_parser(rest[0]).parse(rest[1:])
    except Fault as error:
        return str(error)
    recipe = getattr(parsed, "recipe", None)
    if recipe and recipe not in {*RECIPES, "NAME"}:
        return f"there is no recipe {recipe!r}"
    return None


def problem(command: Command) -> str | None:
    """Why a command cannot be run as it is printed, or None."""
    words = [word for word in command.words if not re.match(r"[A-Z_]+=", word)]
    if not words:
        return None
    arguments = headwater_arguments(words)
    if arguments is not None:
        return parse(arguments)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        missing = [target for target in targets if not re.search(rf"^{target}\b.*:", makefile, re.M)]
        return f"the Makefile has no {missing[0]}" if missing else None
    if words[0] in ("python", "python3") and words[1:2] and words[1].endswith(".py"):
        return script_problem(words[1], words[2:])
    return None


def script_problem(name: str, arguments: list[str]) -> str | None:
    """Why a script of this project cannot be run with these flags, or None."""
    path = ROOT / name
    if not path.is_file():
        return f"there is no {name}"
    source = path.read_text(encoding="utf-8")
    unknown = [word for word in arguments if word.startswith("--") and word.partition("=")[0] not in source]
    return f"{name} has no flag {unknown[0]}" if unknown else None


@every_page
def test_every_printed_command_is_one_the_parser_takes(page):
    commands = printed_commands(page.read_text(encoding="utf-8"))
    assert {command.line: reason for command in commands if (reason := problem(command))} == {}


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("headwater train pairs.tsv --max-time 5m   # a comment", False),
        ("cat a.txt | headwater translate RUN > out.txt", False),
        ("torchrun --nproc-per-node=2 -m headwater train pairs.tsv", False),
        ("python benchmarks/train_steps.py --workload a", False),
        ("headwater train pairs.tsv --maximum-time 5m", True),
        ("headwater teach pairs.tsv", True),
        ("headwater inspect RUN", True),
        ("headwater train a.tsv --recipe multi31k", True),
        ("make a-cake", True),
        ("python benchmarks/train_stops.py", True),
        ("python benchmarks/train_steps.py --play a", True),
    ],
)
def test_a_command_that_does_not_exist_would_be_seen(line, wrong):
    reasons = [problem(command) for command in printed_commands(f"```sh\n{line}\n```\n")]
    assert any(reasons) is wrong


# ------------------------------------------------------------------------------------- commands, flags, files in prose


def spans(text: str) -> list[str]:
    """The inline code of a page."""
    return INLINE.findall(FENCE.sub("", text))


@cache
def known_flags() -> set[str]:
    """Every flag of a verb, of a script or of the programs named above."""
    verbs = [verb for group in VERBS.values() for verb in group]
    flags = {flag for verb in verbs for flag in build_parser(verb)._option_string_actions}
    scripts = [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").glob("*.py")]
    for script in scripts:
        flags |= set(re.findall(r'"(--[\w-]+)"', script.read_text(encoding="utf-8")))
    return flags | OTHER_FLAGS


def unknown_names(text: str) -> list[str]:
    """Verbs and flags in inline code that do not exist."""
    unknown = []
    for span in spans(text):
        verb = re.match(r"headwater ([a-z]+)\b(?!\.)", span)
        if verb and not any(verb[1] in group for group in VERBS.values()):
            unknown.append(span)
        unknown += [flag for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span) if flag not in known_flags()]
    return unknown


@every_page
def test_every_verb_and_flag_in_the_prose_exists(page):
    if page.name == "CHANGELOG.md":  # it may tell of what is gone
        return
    assert unknown_names(page.read_text(encoding="utf-8")) == []


def test_an_unknown_verb_or_flag_in_the_prose_would_be_seen():
    assert unknown_names(
        "Use `headwater teach` with `--smoothing 0.1`; `--label-smoothing` and `headwater train` exist."
    ) == ["headwater teach", "--smoothing"]


def missing_files(text: str) -> list[str]:
    """Files that inline code names, in a folder of the project or of the package, and that are not there."""
    named = [span for span in spans(text) if re.fullmatch(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|c|h|po|md|j2)", span)]
    ours = [name for name in named if any((root / Path(name).parts[0]).is_dir() for root in (ROOT, PACKAGE))]
    return [name for name in ours if not (ROOT / name).exists() and not (PACKAGE / name).exists()]


@every_page
def test_every_file_that_is_named_exists(page):
    assert missing_files(page.read_text(encoding="utf-8")) == []


def test_a_file_that_is_not_there_would_be_seen():
    assert missing_files("See `core/masks.py`, `docs/en/index.md` and `training/exams.py`.") == ["training/exams.py"]
