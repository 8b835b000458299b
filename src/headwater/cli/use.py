"""What the verbs that use a trained model share: where texts come from, and how answers are printed."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.cli.terminal import for_terminal
from headwater.errors import BadInput, NotFound

VERB_OF = {"text-to-text": "translate", "classification": "classify", "tagging": "tag", "answers": "answer"}
TOGETHER = 32  # texts of a file or a pipe that are worked off at a time


def arguments(parser: Parser) -> None:
    parser.add_argument("run", help=say("the folder of a run or of a model", "训练目录或模型目录"))
    told = say(
        "texts, files with one text a line, or - for the standard input", "文本、每行一条的文件,或 - 表示标准输入"
    )
    parser.add_argument("texts", nargs="*", help=told)
    parser.add_argument("--json", action="store_true", help=say("a JSON object a line", "每行输出一个 JSON"))


def loaded(args: argparse.Namespace, task: str) -> Any:
    """The model of a run, if it was trained for this task."""
    from headwater.training.use import load_run

    trained = load_run(args.run)
    if trained.task != task:
        right = f"headwater {VERB_OF.get(trained.task, 'generate')}"
        raise BadInput(f"{args.run} was trained for {trained.task}, this verb is for {task}; use {right}")
    return trained


def groups(texts: list[str]) -> Iterator[list[str]]:
    """The texts in their order, some at a time; with none given, lines as they come."""
    held: list[str] = []
    for line in lines(texts or ["-"]):
        held.append(line)
        if len(held) == TOGETHER or (not texts and sys.stdin.isatty()):
            yield held
            held = []
    if held:
        yield held


def lines(texts: list[str]) -> Iterator[str]:
    for text in texts:
        if text == "-":
            yield from _typed()
        elif _is_file(text):
            yield from _read(Path(text))
        elif text.endswith((".txt", ".tsv")) and " " not in text:
            raise NotFound(f"{text} is not there; check the path, or put a text in quotes")
        else:
            yield text


def _typed() -> Iterator[str]:
    for number, line in enumerate(sys.stdin, 1):
        if any("\ud800" <= c <= "\udfff" for c in line):
            raise BadInput(f"the standard input must be UTF-8, line {number} is not; give its file, or write it anew")
        yield line.rstrip("\n")


def _read(path: Path) -> Iterator[str]:
    """The lines of a file in whatever encoding, as train reads it."""
    from headwater.data.reading.lines import USUAL
    from headwater.data.reading.lines import lines as lines_of
    from headwater.data.reading.problems import Problems

    for line in lines_of(path, USUAL, Problems()):
        if line.fault:
            raise BadInput(f"{path}:{line.number} can not be read, it is {line.fault}; cut it")
        yield line.text


def _is_file(text: str) -> bool:
    try:
        return len(text) < 1000 and Path(text).is_file()
    except (OSError, ValueError):
        return False


def answer(args: argparse.Namespace, task: str, shown: Callable[[Any], str] = str, **how: Any) -> None:
    """Answer every text, a line each."""
    trained = loaded(args, task)
    for some in groups(args.texts):
        for text, found in zip(some, trained(some, **how), strict=True):
            line = json.dumps({"input": text, "output": found}, ensure_ascii=False) if args.json else shown(found)
            print(for_terminal(line), flush=True)
