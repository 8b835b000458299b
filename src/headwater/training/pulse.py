"""A pulse: every process says each second that it lives, and ends when another has fallen silent.

A killed process is noticed by its broken connections. One that is stopped, or hangs in a lock, or is behind a broken
network, breaks none: the others would wait an hour. So they listen, say where they wait, and end; the launcher then
ends, or restarts, the whole team. No step is done without all of them, so none can go on alone.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from headwater.errors import Unavailable

BEAT, SILENCE = 1.0, 20.0  # seconds


class Pulse:
    """store: where all write and read a few words, a connection of its own; it lives in the launcher or the first.

    One thread talks; another watches the clock, because a store behind a broken network may never answer.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world
        self.words: list[bytes] = [b""] * world  # what each has said last
        self.heard = [0.0] * world  # and when
        self.answered = self.since = 0.0  # when the store last answered; silence counts from then on only
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True, name="pulse") for work in (self._talk, self._watch)]

    def start(self, meeting: timedelta) -> None:
        """Beat once, and wait for everybody's first beat."""
        self._beat(0)
        self.store.wait([f"pulse/{rank}" for rank in range(self.world)], meeting)
        self.store.set_timeout(timedelta(seconds=SILENCE))
        self.since = time.monotonic()
        for thread in self.threads:
            thread.start()

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(timeout=2 * BEAT)

    def _beat(self, count: int) -> None:
        self.store.set(f"pulse/{self.rank}", str(count))

    def _talk(self) -> None:
        count = 0
        while not self.stopped.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                self._hear([self.store.get(f"pulse/{rank}") for rank in range(self.world)])
            except RuntimeError:
                self._end("the launcher, or the first process, is gone")
                return

    def _hear(self, said: Sequence[bytes]) -> None:
        self.answered = time.monotonic()
        for rank, word in enumerate(said):
            if word != self.words[rank]:
                self.words[rank], self.heard[rank] = word, self.answered

    def _watch(self) -> None:
        before = time.monotonic()
        while not self.stopped.wait(BEAT):
            now = time.monotonic()
            if now - before > SILENCE / 2:
                self.since = now  # it was paused itself, perhaps with all the others: it blames nobody yet
            elif why := self._silent(now):
                self._end(why)
            before = now

    def _silent(self, now: float) -> str:
        """Who has said nothing for too long; empty if all have spoken."""
        if now - max(self.answered, self.since) > SILENCE:
            return f"the launcher, or the first process, has not answered for {SILENCE:.0f} s; is the network down?"
        late = [rank for rank, heard in enumerate(self.heard) if now - max(heard, self.since) > SILENCE]
        return f"process {late[0]} has been silent for {SILENCE:.0f} s" if late else ""

    def _end(self, why: str) -> None:
        """The main thread waits for ever, so it is not asked."""
        if self.stopped.is_set():
            return
        self.stopped.set()
        sys.stderr.write(f"error: {why}; process {self.rank} stops here:\n")
        faulthandler.dump_traceback(all_threads=True)
        sys.stderr.write("the run goes on from its last checkpoint: headwater train --resume RUN\n")
        sys.stderr.flush()
        os._exit(Unavailable.exit_code)
