"""A pulse: every process says each second that it lives, and ends when another has fallen silent.

A killed process is noticed by its broken connections. One that is stopped, or hangs in a lock, breaks none: the others
would wait an hour. So they listen, say where they wait, and end; the launcher then ends, or restarts, the whole team.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from headwater.errors import Unavailable

BEAT, SILENCE = 1.0, 20.0  # seconds


class Pulse:
    """store: where all write and read a few words, a connection of its own; it lives in the launcher or the first."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True, name="pulse")

    def start(self, meeting: timedelta) -> None:
        """Beat once, and wait for everybody's first beat."""
        self._beat(0)
        self.store.wait([f"pulse/{rank}" for rank in range(self.world)], meeting)
        self.store.set_timeout(timedelta(seconds=SILENCE))
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join(timeout=2 * BEAT)

    def _beat(self, count: int) -> None:
        self.store.set(f"pulse/{self.rank}", str(count))

    def _listen(self) -> None:
        heard: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self.stopped.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                said = [self.store.get(f"pulse/{rank}") for rank in range(self.world)]
            except RuntimeError:
                self._end("the launcher, or the first process, is gone")
                return
            for rank, word in enumerate(said):
                if rank not in heard or heard[rank][0] != word:
                    heard[rank] = word, time.monotonic()
                elif time.monotonic() - heard[rank][1] > SILENCE:
                    self._end(f"process {rank} has been silent for {SILENCE:.0f} s")

    def _end(self, why: str) -> None:
        """The main thread waits for ever, so it is not asked."""
        if self.stopped.is_set():
            return
        sys.stderr.write(f"error: {why}; process {self.rank} stops here:\n")
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write("the run goes on from its last checkpoint: headwater train --resume RUN\n")
        sys.stderr.flush()
        os._exit(Unavailable.exit_code)
