"""Ctrl-C and SIGTERM: the first asks, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """Within it, `asked` is the name of a signal that came, or empty. Only the main thread may listen to signals."""

    def __init__(self) -> None:
        self.asked = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.asked == name:
            raise KeyboardInterrupt
        self.asked = self.asked or name  # a launcher that passes Ctrl-C on as SIGTERM means the same wish
