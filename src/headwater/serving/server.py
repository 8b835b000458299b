"""The HTTP server (uvicorn): connection limits, a strict HTTP/1.1 protocol with timeouts, startup.

Timeouts: uvicorn alone waits without limit for the rest of a request, so a few hundred idle sockets would block it.
Strictness: h11 alone accepts what two programs may parse differently: bare line feeds, folded headers, two lengths.
Limits: connections beyond the limit are refused in accept() itself, without a transport, a task or a parsed request.
They stay below RLIMIT_NOFILE: on EMFILE asyncio would log a traceback and retry forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from headwater.errors import BadSetting, Unavailable
from headwater.i18n import _
from headwater.serving.app import create_app
from headwater.serving.errors import Busy, error_body
from headwater.serving.model_store import ModelStore
from headwater.serving.security import AccessPolicy, is_loopback

log = logging.getLogger("headwater.serving")

MALFORMED_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")  # a bare line feed, or a folded header
MAX_ACTIVE_CONNECTIONS = 100
RESERVED_FDS = 16  # descriptors that stay free for models, runs and the terminal
LINGER_SECONDS = 1.0  # closing at once a socket with unread bytes would reset it before the response arrives
ACCEPT_RETRY_SECONDS = 0.05  # if not even one descriptor is free

# ------------------------------------------------------------------------------------------ HTTP protocol with timeouts


class StrictConnection(h11.Connection):
    """An h11 connection that refuses Content-Length with Transfer-Encoding, and lines that do not end in CR LF."""

    def next_event(self) -> Any:
        """The next event of h11, checked."""
        if self.their_state is h11.IDLE:
            head = self.trailing_data[0].partition(b"\r\n\r\n")[0]
            if MALFORMED_LINE.search(head):
                raise h11.RemoteProtocolError("a header line must end in CR LF and may not be folded")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name) for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError(
                    "a request must have either Content-Length or Transfer-Encoding, not both"
                )
        return event


class TimeoutProtocol(H11Protocol):
    """HTTP/1.1 protocol with timeouts (seconds) for headers, for bodies, and for clients that do not read."""

    headers_timeout = 10.0
    body_timeout = 30.0
    write_timeout = 30.0
    _phase: str = ""
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = StrictConnection(h11.SERVER, self.config.h11_max_incomplete_event_size or 32 << 10)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_phase("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_phase({"IDLE": "headers", "SEND_BODY": "body"}.get(str(self.conn.their_state), ""))

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_phase("")
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _set_phase(self, phase: str) -> None:
        """Start the timeout of a phase ("headers", "body" or ""); more bytes of the same phase do not extend it."""
        if phase == self._phase:
            return
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._phase = phase
        self._read_timer = None
        if phase:
            self._read_timer = self.loop.call_later(getattr(self, f"{phase}_timeout"), self.transport.abort)


# ------------------------------------------------------------------------------------- listening socket with limits

_BUSY_ERROR = Busy(_("too many connections are open; try again in a moment"))
_BUSY_BODY = json.dumps(error_body(_BUSY_ERROR), ensure_ascii=False).encode()
BUSY_RESPONSE = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncache-control: no-store\r\n"
    b"x-content-type-options: nosniff\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
) % (len(_BUSY_BODY), _BUSY_BODY)


def max_open_connections() -> int:
    """Limit on open connections, from RLIMIT_NOFILE and the descriptors open now."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # a system without resource or /dev/fd
        return 10 * MAX_ACTIVE_CONNECTIONS
    return max(4, min(limit, 1 << 16) - used - RESERVED_FDS)


class LimitedSocket(socket.socket):
    """A listening socket whose accept() returns at most max_active connections at a time and refuses the others."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.max_open = max_open_connections()
        self.max_active = max(2, min(MAX_ACTIVE_CONNECTIONS, self.max_open // 2))
        self.active: list[socket.socket] = []
        self.rejected: list[socket.socket] = []
        self.spare_fd = _open_spare_fd()
        self.warned = False

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection within the limit; connections beyond it are rejected."""
        while True:
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._accept_and_close()
                continue
            self.active = _still_open(self.active)
            if len(self.active) < self.max_active:
                self.active.append(connection)
                return connection, address
            self._reject(connection)

    def _reject(self, connection: socket.socket) -> None:
        """Send 503 and close after LINGER_SECONDS; close at once if too many are being rejected already."""
        if len(self.active) + len(self.rejected) >= self.max_open:
            self.rejected = _still_open(self.rejected)
        if len(self.active) + len(self.rejected) >= self.max_open:
            self._warn_once()
            connection.close()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(BUSY_RESPONSE)
            connection.shutdown(socket.SHUT_WR)
        self.rejected.append(connection)
        asyncio.get_running_loop().call_later(LINGER_SECONDS, connection.close)

    def _accept_and_close(self) -> None:
        """Out of descriptors: accept the waiting connection with the spare one, and close it."""
        self._warn_once()
        if self.spare_fd is not None:
            os.close(self.spare_fd)
            try:
                super().accept()[0].close()
            finally:
                self.spare_fd = _open_spare_fd()
        if self.spare_fd is None:
            time.sleep(ACCEPT_RETRY_SECONDS)
            self.spare_fd = _open_spare_fd()
            raise BlockingIOError

    def _warn_once(self) -> None:
        if not self.warned:
            log.warning("more than %d connections: those beyond are closed; ulimit -n raises the limit", self.max_open)
        self.warned = True

    def close(self) -> None:
        for connection in self.rejected:
            connection.close()
        if self.spare_fd is not None:
            os.close(self.spare_fd)
            self.spare_fd = None
        super().close()


def _still_open(connections: list[socket.socket]) -> list[socket.socket]:
    return [connection for connection in connections if connection.fileno() >= 0]


def _open_spare_fd() -> int | None:
    """A descriptor to release when no other is free; None if none can be opened."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None


# --------------------------------------------------------------------------------------------------------- startup


def bind_socket(host: str, port: int) -> LimitedSocket:
    """A listening socket; port 0 takes a free port."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = LimitedSocket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((_resolve_host(host), port))
        listener.listen(128)
        listener.setblocking(False)
    except OSError as error:
        is_in_use = error.errno == errno.EADDRINUSE
        remedy = _("choose another --port, or 0 for a free one") if is_in_use else _("check --host and --port")
        raise Unavailable(
            _(
                "cannot listen on {host}:{port} ({reason}); {remedy}",
                host=host,
                port=port,
                reason=(error.strerror or str(error)).lower(),
                remedy=remedy,
            )
        ) from None
    return listener


def _resolve_host(host: str) -> str:
    """An IP address of a host name; localhost is 127.0.0.1 without a name server."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        ipaddress.ip_address(host)
    except ValueError:
        try:
            return socket.gethostbyname(host)
        except OSError:
            raise BadSetting(
                _("--host must be an address of this machine, got {host!r}; try 127.0.0.1", host=host[:60])
            ) from None
    return host


def build_server(
    model_store: ModelStore, policy: AccessPolicy, protocol: type[TimeoutProtocol] = TimeoutProtocol
) -> uvicorn.Server:
    """A uvicorn server with limits on headers and timeouts; LimitedSocket limits its connections."""
    config = uvicorn.Config(
        create_app(model_store, policy),
        loop="asyncio",  # the loop that calls LimitedSocket.accept()
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


def serve(model_store: ModelStore, host: str, port: int, token: bool, on_login_url: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. on_login_url(url) is called at startup, and again after each use of a one-time URL."""
    if not token and not is_loopback(host):
        AccessPolicy(host, port)  # raises BadSetting before the socket is bound
    listener = bind_socket(host, port)
    bound_port = listener.getsockname()[1]
    policy = AccessPolicy(host, bound_port, secrets.token_urlsafe(32) if token else "", on_login_url)
    on_login_url(policy.login_url())
    build_server(model_store, policy).run(sockets=[listener])
