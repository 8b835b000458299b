"""A worker thread that runs one call at a time off the event loop, with a bounded queue."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from headwater.i18n import _
from headwater.serving.errors import Busy

T = TypeVar("T")
END_OF_STREAM: Any = object()


class ThreadWorker:
    """One worker thread. At most max_pending calls wait or run; more are refused as Busy."""

    def __init__(self, max_pending: int = 64, name: str = "model") -> None:
        self.max_pending = max_pending
        self.num_pending = 0
        self.pool = ThreadPoolExecutor(1, name)

    async def call(self, function: Callable[[], T]) -> T:
        """Run function() in the worker thread."""
        self._reserve()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, function)
        finally:
            self.num_pending -= 1

    async def stream(self, function: Callable[[], Iterator[T]]) -> AsyncIterator[T]:
        """Iterate function() in the worker thread; it stops after its next item if the consumer stops."""
        self._reserve()
        loop = asyncio.get_running_loop()
        cancelled = threading.Event()
        items: asyncio.Queue[Any] = asyncio.Queue()

        def put(item: Any) -> None:
            loop.call_soon_threadsafe(items.put_nowait, item)

        def run() -> None:
            try:
                for item in function():
                    put(item)
                    if cancelled.is_set():
                        break
                put(END_OF_STREAM)
            except BaseException as error:
                put(error)

        finished = loop.run_in_executor(self.pool, run)
        try:
            while (item := await items.get()) is not END_OF_STREAM:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            cancelled.set()
            await finished
            self.num_pending -= 1

    def _reserve(self) -> None:
        if self.num_pending >= self.max_pending:
            raise Busy(_("{limit} requests are waiting already; try again in a moment", limit=self.max_pending))
        self.num_pending += 1
