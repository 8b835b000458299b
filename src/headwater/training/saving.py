"""Checkpoints written while training goes on: a copy is taken between two steps, a thread writes it.

One at a time: the next waits for the last. What became of it is said at the next step, and at the end it is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from headwater.errors import BadFile
from headwater.training.events import Event, Kept, Noted

CHEAP = 1 / 50  # a checkpoint is put off until it costs less than this share of the time since the last one


class _Running(NamedTuple):
    step: int
    began: float
    path: Future[str]


class Saver:
    """every: seconds between two checkpoints; steps: in place of time; tell: where it is said what became of them."""

    def __init__(self, every: float, steps: int, tell: Callable[[Event], None]) -> None:
        self.every, self.steps, self.tell = every, steps, tell
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.running: _Running | None = None
        self.last, self.took = time.monotonic(), 0.0

    def due(self, step: int) -> bool:
        """Whether a checkpoint should be taken after this step."""
        if self.steps:
            return step % self.steps == 0
        return self.running is None and time.monotonic() - self.last >= max(self.every, self.took / CHEAP)

    def begin(self, step: int, took: Callable[[], Any], keep: Callable[[Any], str] | None) -> None:
        """Take a copy, and have it kept."""
        self.collect()
        began, copy = time.monotonic(), took()
        if keep is not None:
            self.running = _Running(step, began, self.thread.submit(keep, copy))

    def collect(self, wait: bool = True) -> None:
        """What became of the last one, once it is done. What is no fault of the disk is raised here."""
        if self.running is None or not (wait or self.running.path.done()):
            return
        running, self.running = self.running, None
        path = tried(running.path.result, self.tell, running.step)
        self.last = time.monotonic()
        self.took = self.last - running.began
        if path:
            self.tell(Kept(running.step, path, self.took))


def tried(work: Callable[[], Any], tell: Callable[[Event], None], step: int) -> Any:
    """A full or failing disk is said, and tried again next time; training goes on."""
    try:
        return work()
    except (OSError, BadFile) as error:
        tell(Noted(step, f"nothing was saved: {getattr(error, 'strerror', '') or error}; trying again later"))
        return None
