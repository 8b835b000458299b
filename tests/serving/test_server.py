"""A real server on a free port: slow clients are disconnected, others are served meanwhile, the queue is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time

import pytest
from asyncio_runner import run

from headwater.errors import Unavailable
from headwater.serving.errors import Busy
from headwater.serving.model_store import ModelStore
from headwater.serving.security import AccessPolicy
from headwater.serving.server import TimeoutProtocol, bind_socket, build_server
from headwater.serving.worker import ThreadWorker


class Hurried(TimeoutProtocol):
    headers_timeout, body_timeout, write_timeout = 0.4, 0.6, 0.5


@contextlib.contextmanager
def running(protocol=Hurried, model_store=None):
    listening = bind_socket("127.0.0.1", 0)
    port = listening.getsockname()[1]
    built = build_server(model_store or ModelStore([]), AccessPolicy("127.0.0.1", port), protocol)
    thread = threading.Thread(target=built.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not built.started:
        time.sleep(0.01)
    try:
        yield port
    finally:
        built.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def port():
    with running() as number:
        yield number


def call(port, raw, wait=5.0):
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as line:
        line.sendall(raw)
        return read_all(line)


def read_all(line):
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := line.recv(65536):
            got += part
    return got


def closed_after(port, *pieces, pause=0.15):
    """Send the pieces slowly; seconds until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        start = time.monotonic()
        for piece in pieces:
            with contextlib.suppress(OSError):
                line.sendall(piece)
            line.settimeout(pause)
            try:
                if not line.recv(10):
                    break
            except TimeoutError:
                continue
            except ConnectionResetError:
                break
        line.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            line.recv(10)
        return time.monotonic() - start


def posting(port, name, length, more=""):
    printed = f"host: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n{more}content-length: {length}"
    return f"POST /api/{name} HTTP/1.1\r\n{printed}\r\n\r\n".encode()


def alive(port):
    head = f"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode()
    return call(port, head).startswith(b"HTTP/1.1 200")


def test_headers_that_do_not_end_are_cut_off(port):
    drops = [b"GET / HTTP/1.1\r\n", *[b"x-a: b\r\n"] * 60]
    assert 0.3 < closed_after(port, *drops) < 2, "more bytes do not extend the deadline"
    assert closed_after(port, b"") < 2, "a silent client is disconnected too"


def test_a_body_that_does_not_end_is_cut_off(port):
    assert 0.4 < closed_after(port, posting(port, "models", 99), *[b" "] * 60) < 2


def test_the_second_request_on_a_line_has_a_deadline_too(port):
    full = f"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port), timeout=5) as line:
        line.sendall(full)
        got = b""
        while b'{"status":"ok"}' not in got:
            got += line.recv(4096)
        line.sendall(b"GET /healthz HTT")
        start = time.monotonic()
        assert read_all(line) == b"" and time.monotonic() - start < 2


def test_slow_clients_do_not_block_others(port):
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    try:
        for line in idle:
            line.sendall(b"GET / HT")
        start = time.monotonic()
        assert alive(port) and time.monotonic() - start < 2
    finally:
        for line in idle:
            line.close()


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET " + b"/a" * 40_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /api/models HTTP/1.1\r\nhost: HOST\r\nconnection: close\r\ncontent-length: 5\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)
def test_what_is_no_request_is_refused(port, raw):
    answer = call(port, raw.replace(b"HOST", f"127.0.0.1:{port}".encode()))
    assert answer == b"" or answer.split(b" ")[1] in (b"400", b"403", b"415", b"414", b"431")
    assert alive(port)


def test_an_upgrade_is_not_followed(port):
    head = f"GET / HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: Upgrade, close\r\nupgrade: websocket\r\n\r\n"
    assert b" 101 " not in call(port, head.encode())


def test_a_port_in_use_is_reported():
    connections = bind_socket("127.0.0.1", 0)
    with pytest.raises(Unavailable, match=r"cannot listen on .* choose another --port, or 0 for a free one"):
        bind_socket("127.0.0.1", connections.getsockname()[1])
    connections.close()


# --------------------------------------------------------------------------------------------------------- the worker


def test_one_at_a_time_and_no_more_than_so_many_wait():
    async def scene():
        worker, inside, max_value = ThreadWorker(max_pending=3), [], []

        def work():
            inside.append(1)
            max_value.append(len(inside))
            time.sleep(0.05)
            inside.pop()
            return 7

        calls = [asyncio.create_task(worker.call(work)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(Busy, match="try again"):
            await worker.call(work)
        assert await asyncio.gather(*calls) == [7, 7, 7] and max(max_value) == 1 and worker.num_pending == 0

    run(scene())


def test_a_stream_without_consumer_stops_after_one_item():
    async def scene():
        worker, built = ThreadWorker(), []

        def work():
            for n in range(1000):
                built.append(n)
                time.sleep(0.002)
                yield n

        stream = worker.stream(work)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        await stream.aclose()
        count = len(built)
        await asyncio.sleep(0.05)
        assert len(built) == count < 20 and worker.num_pending == 0

    run(scene())


def test_a_fault_in_a_stream_arrives():
    async def scene():
        def work():
            yield 1
            raise Busy("no")

        stream = ThreadWorker().stream(work)
        assert await anext(stream) == 1
        with pytest.raises(Busy):
            await anext(stream)

    run(scene())


def test_an_aborted_chat_frees_the_worker(port):
    body = json.dumps({"model": "tiny decoder", "text": "the cat", "max_tokens": 1000}).encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
            line.sendall(posting(port, "chat", len(body)) + body)
            assert line.recv(200).startswith(b"HTTP/1.1 200")
    start = time.monotonic()
    about = json.dumps({"model": "tiny decoder"}).encode()
    head = posting(port, "model_info", len(about), more="connection: close\r\n")
    assert b" 200 " in call(port, head + about, 20)
    assert time.monotonic() - start < 5


def test_a_reader_that_does_not_read_is_cut_off():
    """The transport pauses and resumes writing; in between there is a deadline."""

    async def scene(reads):
        protocol, cut = Hurried.__new__(Hurried), []
        protocol.loop = asyncio.get_running_loop()
        protocol.transport = type("Transport", (), {"abort": lambda self: cut.append(1)})()
        protocol.flow = type("Flow", (), {"pause_writing": lambda self: None, "resume_writing": lambda self: None})()
        protocol.pause_writing()
        if reads:
            protocol.resume_writing()
        await asyncio.sleep(0.7)
        return bool(cut)

    assert run(scene(reads=False)) is True and run(scene(reads=True)) is False
