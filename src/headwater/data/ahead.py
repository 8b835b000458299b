"""Work done ahead of its use, in one thread: the order stays, only the waiting goes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Full, Queue
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 4) -> Iterator[T]:
    """The same items in the same order, up to `depth` of them made before they are asked for.

    What the maker raises is raised here, at its place in the row; a caller that stops early stops the thread.
    """
    ready: Queue[tuple[str, object]] = Queue(depth)
    stopped = threading.Event()

    def put(kind: str, value: object) -> bool:
        while not stopped.is_set():
            try:
                ready.put((kind, value), timeout=0.1)
                return True
            except Full:
                continue
        return False

    def make() -> None:
        try:
            for item in items:
                if not put("item", item):
                    return
            put("end", None)
        except BaseException as error:  # handed over, not swallowed
            put("error", error)

    worker = threading.Thread(target=make, daemon=True, name="data-ahead")
    worker.start()
    try:
        while True:
            try:
                kind, value = ready.get(timeout=1)
            except Empty:
                continue
            if kind == "end":
                return
            if kind == "error":
                raise value  # type: ignore[misc]
            yield value  # type: ignore[misc]
    finally:
        stopped.set()
        worker.join(timeout=5)
