"""How far the reading of a large file is, for whoever wants to show it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Protocol, TextIO

Report = Callable[[Path, int, int], None]  # a file, its bytes read so far, and all its bytes
Say = Callable[[str, str], str]


def _silent(path: Path, done: int, total: int) -> None: ...


_report: ContextVar[Report] = ContextVar("report", default=_silent)


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """While this lasts, `report` hears of every block that is read of a file."""
    before = _report.set(report)
    try:
        yield
    finally:
        _report.reset(before)


class Watched:
    """A stream whose reads are reported; `raw` is the file beneath it, packed or not."""

    def __init__(self, path: Path, stream: Readable, raw: BinaryIO, total: int) -> None:
        self.path, self.stream, self.raw, self.total, self.report = path, stream, raw, total, _report.get()

    def read(self, size: int, /) -> bytes:
        block = self.stream.read(size)
        self.report(self.path, self.raw.tell() if block else self.total, self.total)
        return block


class ReadingProgress:
    """Shows what is read: on a terminal one line that is overwritten, elsewhere a line every few seconds."""

    def __init__(self, say: Say, out: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.say, self.out, self.clock = say, out or sys.stderr, clock
        self.terminal = self.out.isatty()
        self.every = 0.2 if self.terminal else 5.0  # seconds between two messages
        self.shown = False
        self.last = self.clock()

    def __call__(self, path: Path, done: int, total: int) -> None:
        if done >= total:
            self.clear()
        elif self.clock() - self.last >= self.every:
            self.last = self.clock()
            size, whole = f"{done / 1e6:.0f} MB", f"{total / 1e6:.0f} MB"
            name = "".join(c if c.isprintable() else "·" for c in path.name)
            text = self.say(f"reading {name} … {size} of {whole}", f"正在读取 {name} … {size} / {whole}")
            self.shown = True
            self.out.write(f"\r{text}\x1b[K" if self.terminal else f"{text}\n")
            self.out.flush()

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self.shown and self.terminal:
            self.out.write("\r\x1b[K")
            self.out.flush()
        self.shown = False
