"""Starting the server: a socket bound before anything is loaded, uvicorn with patience and bounds."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from collections.abc import Callable

import uvicorn

from headwater.errors import BadSetting, Unavailable
from headwater.serving.app import app
from headwater.serving.gate import Guard, is_loopback
from headwater.serving.listener import Listener
from headwater.serving.patience import Patient
from headwater.serving.shelf import Shelf


def bound(host: str, port: int) -> Listener:
    """A listening socket; port 0 takes a free one."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        made = Listener(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((_address(host), port))
        made.listen(128)
        made.setblocking(False)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        remedy = "choose another --port, or 0 for a free one" if taken else "check --host and --port"
        raise Unavailable(
            f"{host}:{port} can not be listened on ({(error.strerror or str(error)).lower()}); {remedy}"
        ) from None
    return made


def _address(host: str) -> str:
    """localhost must not be asked of a name server: it is 127.0.0.1."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            return socket.gethostbyname(host)
        except OSError:
            raise BadSetting(f"--host must be an address of this machine, got {host[:60]!r}; try 127.0.0.1") from None
    return host


def server(shelf: Shelf, guard: Guard, protocol: type[Patient] = Patient) -> uvicorn.Server:
    """A server with bounds on headers and waiting; how many connections there are is bounded by its Listener."""
    config = uvicorn.Config(
        app(shelf, guard),
        loop="asyncio",  # the one that accepts through Listener
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="error",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        h11_max_incomplete_event_size=32 << 10,
    )
    return uvicorn.Server(config)


def serve(shelf: Shelf, host: str, port: int, token: bool, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. say(link) is called when the page can be opened, and again when a one-time link is used."""
    if not token and not is_loopback(host):
        Guard(host, port)  # refuses, with words
    listening = bound(host, port)
    guard = Guard(host, listening.getsockname()[1], secrets.token_urlsafe(32) if token else "", say)
    say(guard.entrance())
    server(shelf, guard).run(sockets=[listening])
