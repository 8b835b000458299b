"""A clock that only the test moves: reading, steps and evaluations take as long as it says."""

from __future__ import annotations

import time

from headwater.training import api, run_output, setup
from headwater.training.evaluate import Evaluator
from headwater.training.trainer import Trainer


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
        self.slow(setup, "load_task_data", reading)
        self.slow(Trainer, "_backward", step)
        self.patch.setattr(setup, "benchmark_step", lambda *given: self.benchmarked(step))
        self.slow(
            Evaluator,
            "scores",
            lambda evaluator, model: row * min(evaluator.max_examples, len(evaluator.task_data.valid_examples)),
        )
        self.slow(api, "load_run", closing)
        self.slow(run_output, "load_run", closing)

    def benchmarked(self, step, steps=4):
        """The seconds of a step, after some of them have passed."""
        seconds = step() if callable(step) else step
        self.now += steps * seconds
        return seconds
