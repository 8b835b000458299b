"""asyncio.run, also where a browser's own loop already runs in this thread."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def run(scene: Coroutine[Any, Any, Any]) -> Any:
    """Play a scene to its end, in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, scene).result()
