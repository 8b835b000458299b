"""A clock that only the test moves: reading, steps and evaluations take as long as it says."""

from __future__ import annotations

import time

from headwater.training import teaching
from headwater.training.exam import Exam
from headwater.training.loop import Trainer


class Clock:
    """Every way to ask for the time tells its own. Seconds pass where `slow` says so."""

    def __init__(self, monkeypatch):
        self.now, self.patch = 1000.0, monkeypatch
        for name in ("monotonic", "perf_counter", "process_time"):
            monkeypatch.setattr(time, name, lambda: self.now)

    def slow(self, owner, name, seconds):
        """owner.name takes so long from now on. seconds: a number, or a function of what it is called with."""
        real = getattr(owner, name)

        def takes(*given, **more):
            self.now += seconds(*given) if callable(seconds) else seconds
            return real(*given, **more)

        self.patch.setattr(owner, name, takes)

    def training(self, reading=0.0, step=1.0, row=0.0, closing=0.0):
        """A whole run: seconds of reading, of a step, of evaluating one row, and of what comes after the last step."""
        self.slow(teaching, "gathered", reading)
        self.slow(Trainer, "_backward", step)
        self.slow(Exam, "__call__", lambda exam, model: row * min(exam.rows, len(exam.material.examples)))
        self.slow(teaching, "load_run", closing)
