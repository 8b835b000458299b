"""The form of requests, and a server with few file descriptors or very many clients."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from asyncio_runner import run
from test_server import alive, call, running

HEALTH = "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\n{more}\r\n"
POST = "POST /api/models HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n{more}\r\n"


LENGTHS = ["content-length: 4", "transfer-encoding: chunked"]


@pytest.fixture(scope="module")
def port():
    with running() as number:
        yield number


def answers(port, raw):
    """The status lines that come back on one connection until it is closed."""
    return re.findall(rb"HTTP/1\.1 (\d+)", call(port, raw))


@pytest.mark.parametrize("first", [POST, HEALTH], ids=["POST", "GET"])
@pytest.mark.parametrize("order", [LENGTHS, LENGTHS[::-1]], ids=["length first", "encoding first"])
def test_two_lengths_end_the_connection(port, first, order):
    """400, and the request that was smuggled into the body gets no response."""
    more = "\r\n".join(order) + "\r\n"
    smuggled = HEALTH.format(port=port, more="connection: close\r\n")
    raw = first.format(port=port, more=more) + "0\r\n\r\n" + smuggled
    assert answers(port, raw.encode()) == [b"400"]
    assert alive(port)


def test_one_length_keeps_the_connection(port):
    """Plain requests on one connection all get a response."""
    raw = POST.format(port=port, more="transfer-encoding: chunked\r\n") + "2\r\n{}\r\n0\r\n\r\n"
    raw += POST.format(port=port, more="content-length: 2\r\n") + "{}"
    assert answers(port, (raw + HEALTH.format(port=port, more="connection: close\r\n")).encode()) == [b"200"] * 3


@pytest.mark.parametrize(
    "raw",
    [
        "GET /healthz HTTP/1.1\nhost: 127.0.0.1:{port}\nconnection: close\n\n",
        "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\nconnection: close\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx-a: b\r\n c\r\nconnection: close\r\n\r\n",
        "GET /healthz HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nx-a: b\r\n\tc\r\nconnection: close\r\n\r\n",
    ],
)
def test_lines_that_can_be_read_in_two_ways_are_refused(port, raw):
    assert answers(port, raw.format(port=port).encode()) == [b"400"]


def test_a_body_may_have_any_lines(port):
    body = '{\n "model":\n "tiny decoder"\n}'
    more = f"content-length: {len(body)}\r\nconnection: close\r\n"
    raw = POST.replace("models", "model_info").format(port=port, more=more) + body
    assert answers(port, raw.encode()) == [b"200"]


# -------------------------------------------------------------------------------------------------- few descriptors

SERVE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
from headwater.serving.model_store import ModelStore
from headwater.serving.server import serve
serve(ModelStore([]), "127.0.0.1", 0, False, lambda link: print(link, flush=True))
"""


@contextlib.contextmanager
def alone(descriptors):
    """A server in a separate process with a limit on open files: the process and its port."""
    command = [sys.executable, "-c", SERVE, str(descriptors)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            yield server, int(re.search(rb":(\d+)/", server.stdout.readline())[1])
        finally:
            server.terminate()


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read from /proc, which is not here")
def test_a_server_with_few_descriptors_neither_spins_nor_floods():
    with alone(64) as (server, number):
        connections = []
        for _ in range(90):
            with contextlib.suppress(OSError):
                connections.append(socket.create_connection(("127.0.0.1", number), timeout=5))
        before, start = cpu_seconds(server.pid), time.monotonic()
        time.sleep(3)
        busy = (cpu_seconds(server.pid) - before) / (time.monotonic() - start)
        for line in connections:
            line.close()
        deadline = time.monotonic() + 10
        while not answered(number) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert answered(number), "it responds after they are closed"
        server.terminate()
        printed = server.stderr.read().decode()
    assert busy < 0.3, "no busy loop while idle"
    assert "Traceback" not in printed and len(printed.splitlines()) <= 1, printed[:2000]


def answered(port):
    try:
        return alive(port)
    except OSError:
        return False


# --------------------------------------------------------------------------------------------------- very many clients

CROWD = 1000


async def one(port, durations):
    start = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        durations.setdefault("closed", []).append(time.monotonic() - start)
        return
    try:
        writer.write(HEALTH.format(port=port, more="connection: close\r\n").encode())
        head = await asyncio.wait_for(reader.read(20), 20)
        durations.setdefault(head[9:12].decode() or "closed", []).append(time.monotonic() - start)
    except OSError:
        durations.setdefault("closed", []).append(time.monotonic() - start)
    finally:
        writer.close()


@pytest.mark.slow
def test_a_thousand_clients_are_answered_or_refused_quickly():
    """Every client gets a response. The bound is wide: the clients run on the same CPUs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2 * CROWD:
        pytest.skip(f"a thousand clients need {2 * CROWD} descriptors, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * CROWD), hard))

    async def crowd(number):
        durations: dict[str, list[float]] = {}
        await asyncio.gather(*(one(number, durations) for _ in range(CROWD)))
        return durations

    try:
        with alone(2 * CROWD) as (_, number):
            durations = run(crowd(number))
            assert alive(number)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    counts = {kind: len(times) for kind, times in durations.items()}
    assert set(counts) <= {"200", "503"} and sum(counts.values()) == CROWD, counts
    assert counts["200"] >= 90, "accepted connections are served"
    refused = sorted(durations.get("503", [0.0]))
    print(counts, f"refusals: p50 {refused[len(refused) // 2]:.3f} s, p99 {refused[int(0.99 * len(refused))]:.3f} s")
    assert refused[-1] < 5
