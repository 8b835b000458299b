"""Many clients at once: every request gets a response or a 503, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from asyncio_runner import run
from test_server import alive, running

CLIENTS, EACH, LORISES = 100, 10, 80
WAITS = (0.15, 0.4, 1.0, 2.0)  # as the page waits where the server is busy


def rss() -> float:
    """Megabytes of this process (the server runs in it)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def answer(reader) -> tuple[int, dict]:
    """One response of a keep-alive connection: its status and its JSON."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.split(": ", 1) for line in head.decode().lower().split("\r\n")[1:] if ": " in line)
    body = await reader.readexactly(int(fields["content-length"]))
    return int(head.split(b" ")[1]), json.loads(body) if b"json" in head else {}


async def client(port: int, number: int, seen: Counter) -> None:
    """Send requests, and retry if the server is busy, as the page does; a closed connection is reopened."""
    body = json.dumps({"model": "tiny decoder", "text": f"the cat {number}", "num_candidates": 4}).encode()
    name = "next_token" if number % 4 == 0 else "model_info"
    body = body if name == "next_token" else b'{"model":"tiny decoder"}'
    head = f"POST /api/{name} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(body)}\r\n\r\n"
    done, turned_away = 0, 0
    while done < EACH:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while done < EACH:
                writer.write(head.encode() + body)
                status, response = await answer(reader)
                seen[status] += 1
                if status == 503:
                    await asyncio.sleep(WAITS[min(turned_away, 3)] * (0.5 + number / CLIENTS))
                    turned_away += 1
                    continue
                assert status == 200 and ("candidates" in response or response["name"] == "tiny decoder"), response
                done, turned_away = done + 1, 0
        except (asyncio.IncompleteReadError, ConnectionError):
            seen["closed"] += 1
        finally:
            writer.close()


async def crowd(port: int) -> Counter:
    seen: Counter = Counter()
    async with asyncio.timeout(120):
        await asyncio.gather(*(client(port, number, seen) for number in range(CLIENTS)))
    return seen


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc, which is not here")
def test_a_thousand_requests_of_a_hundred_clients():
    with running() as port:
        run(client(port, 0, Counter()))  # loads the model
        before = rss()
        seen = run(crowd(port))
        assert seen[200] == CLIENTS * EACH, "every client got all responses"
        assert set(seen) <= {200, 503, "closed"}, "no other status"
        assert rss() - before < 60, "memory does not grow with the number of clients"
        assert alive(port)


def test_those_who_only_hold_the_line_are_let_go():
    """Slow-loris clients are disconnected at the deadline; other clients are served meanwhile."""
    with running() as port:
        connections = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(LORISES)]
        for line in connections:
            line.sendall(b"POST /api/model_info HTTP/1.1\r\nhost: 127.")
        assert alive(port), "other connections are accepted"
        start = time.monotonic()
        for line in connections:
            with contextlib.suppress(ConnectionResetError):
                assert line.recv(10) == b""
            line.close()
        assert time.monotonic() - start < 5, "all of them were closed"
        assert alive(port)
