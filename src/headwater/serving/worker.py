"""One call at a time in a thread of its own, so that the event loop stays free; a bounded number wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headwater.inspection.words import Both
from headwater.serving.faults import Busy

T = TypeVar("T")
DONE: Any = object()


class Worker:
    def __init__(self, most: int = 64, name: str = "model") -> None:
        self.most, self.waiting = most, 0
        self.pool = ThreadPoolExecutor(1, name)

    async def call(self, work: Callable[[], T]) -> T:
        """work() in the thread of this worker."""
        self._admit()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        finally:
            self.waiting -= 1

    async def stream(self, work: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
        """What work() yields, as it comes. Where nobody listens any more, it is stopped after its next item."""
        self._admit()
        loop, gone = asyncio.get_running_loop(), threading.Event()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def tell(item: Any) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def run() -> None:
            try:
                for item in work():
                    tell(item)
                    if gone.is_set():
                        break
                tell(DONE)
            except BaseException as error:
                tell(error)

        done = loop.run_in_executor(self.pool, run)
        try:
            while (item := await items.get()) is not DONE:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            gone.set()
            await done
            self.waiting -= 1

    def _admit(self) -> None:
        if self.waiting >= self.most:
            raise Busy(
                Both(
                    f"{self.most} questions are waiting already; ask again in a moment",
                    f"已有 {self.most} 个提问在等；请稍后再问",
                )
            )
        self.waiting += 1
