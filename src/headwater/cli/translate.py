"""headwater translate RUN "text": what a model trained on pairs of texts makes of it; with --out, whole files.

A file is worked off in windows of lines, each sorted by length inside and written in its old order. What is done lies
in OUT.part; the same command, after whatever stopped it, goes on there and ends with the file it would have written.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from headwater.cli import use
from headwater.cli.language import say
from headwater.cli.parser import Parser
from headwater.errors import BadSetting, Fault
from headwater.weights.files import read_bounded
from headwater.weights.strict_json import parse_object

WINDOW = 256  # lines that are sorted and written together


def arguments(parser: Parser) -> None:
    use.arguments(parser)
    parser.add_argument(
        "--beam", type=int, default=4, help=say("beginnings carried along [4]; 1: greedy", "束宽 [4];1 为贪心")
    )
    told = say(
        "write here, a line for each; stopped, the same command goes on", "写入此文件,逐行对应;中断后重复同一命令即续写"
    )
    parser.add_argument("--out", "-o", help=told)


def run(args: argparse.Namespace) -> None:
    if args.out is None:
        use.answer(args, "text-to-text", beam=args.beam)
        return
    out = Path(args.out)
    if out.exists():
        raise BadSetting(f"--out must be a new file, {out} is there already; choose another name")
    trained = use.loaded(args, "text-to-text")
    done = Part(out, {"run": args.run, "texts": args.texts, "beam": args.beam, "json": args.json})
    count = done.follow(use.lines(args.texts or ["-"]), lambda some: trained(some, beam=args.beam))
    print(say(f"{count:,} lines in {out}", f"{out} 中有 {count:,} 行"), file=sys.stderr)


class Part:
    """A file that is being written: OUT.part with whole windows of lines, OUT.job with what was asked."""

    def __init__(self, out: Path, asked: dict[str, Any]) -> None:
        self.out, self.json = out, asked["json"]
        self.path, self.job = (out.with_name(out.name + end) for end in (".part", ".job"))
        before = self._before()
        for name, value in asked.items() if before is not None else ():
            if before.get(name) != value:  # type: ignore[union-attr]
                came = f"{name} {before.get(name)!r}, got {value!r}"  # type: ignore[union-attr]
                raise BadSetting(f"{self.path} was begun with {came}; finish it with that, or remove it")
        if before is None:
            self.path.write_bytes(b"")
            self.job.write_text(json.dumps(asked), encoding="utf-8")

    def _before(self) -> dict[str, Any] | None:
        """What was asked when the part was begun; None where there is none, or its note is not whole."""
        try:
            return parse_object(read_bounded(self.job, 1 << 20), self.job) if self.path.exists() else None
        except Fault:
            return None

    def follow(self, lines: Iterator[str], make: Callable[[Sequence[str]], Sequence[str]]) -> int:
        """Write what make() makes of the lines that are still to do; gives how many there are in all."""
        count = self._resume()
        for _ in islice(lines, count):
            pass
        begun, first = time.monotonic(), count
        with self.path.open("ab") as file:
            while window := list(islice(lines, WINDOW)):
                file.write("".join(self._told(window, in_order(window, make))).encode())
                file.flush()
                count += len(window)
                rate = (count - first) / (time.monotonic() - begun)
                print(f"\r{count:,} · {rate:.1f}/s", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        self.path.replace(self.out)
        self.job.unlink()
        return count

    def _resume(self) -> int:
        """Cut off what was not written to the end of a window: so the rest is made as if nothing had happened."""
        lines, size, here = 0, 0, 0
        with self.path.open("r+b") as file:
            for number, line in enumerate(file, 1):
                here += len(line)
                if number % WINDOW == 0 and line.endswith(b"\n"):
                    lines, size = number, here
            file.truncate(size)
        return lines

    def _told(self, window: Sequence[str], made: Sequence[str]) -> Iterator[str]:
        for line, answer in zip(window, made, strict=True):
            if self.json:
                yield json.dumps({"input": line, "output": answer}, ensure_ascii=False) + "\n"
            else:
                yield " ".join(answer.split("\n")) + "\n"


def in_order(window: Sequence[str], make: Callable[[Sequence[str]], Sequence[str]]) -> list[str]:
    """make() of each line, asked in lots of like length; an empty line stays empty."""
    made = [""] * len(window)
    order = sorted((i for i, line in enumerate(window) if line.strip()), key=lambda i: len(window[i]))
    for first in range(0, len(order), use.TOGETHER):
        some = order[first : first + use.TOGETHER]
        for i, answer in zip(some, make([window[i] for i in some]), strict=True):
            made[i] = answer
    return made
