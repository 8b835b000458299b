"""A listening socket that serves so many connections at a time, and refuses the others as cheaply as it can.

A refusal is sent in accept() itself, without a transport, a task or a parsed request. The limits are kept below
RLIMIT_NOFILE: asyncio answers EMFILE with a traceback, and tries again without end while the connection still waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import time
from typing import Any

from headwater.inspection.words import Both
from headwater.serving.faults import Busy, told

log = logging.getLogger("headwater.serving")
MOST_SERVED = 100
RESERVED = 16  # descriptors that stay free for models, runs and the terminal
LINGER = 1.0  # seconds: closed at once, a socket with unread bytes would cut its own answer off
PAUSE = 0.05  # seconds, where not even one descriptor can be spared

_BUSY = Busy(Both("too many connections are open; ask again in a moment", "打开的连接太多；请稍后再问"))
_BODY = json.dumps(told(_BUSY), ensure_ascii=False).encode()
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncache-control: no-store\r\n"
    b"x-content-type-options: nosniff\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
) % (len(_BODY), _BODY)


def most_connections() -> int:
    """How many connections may be open, by RLIMIT_NOFILE and the descriptors that are open now."""
    try:
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        used = len(os.listdir("/dev/fd"))
    except (ImportError, OSError):  # a system without either
        return 10 * MOST_SERVED
    return max(4, min(limit, 1 << 16) - used - RESERVED)


class Listener(socket.socket):
    """accept() as the event loop calls it: a connection to serve, or BlockingIOError where nobody waits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.most = most_connections()
        self.most_served = max(2, min(MOST_SERVED, self.most // 2))
        self.served: list[socket.socket] = []
        self.refused: list[socket.socket] = []
        self.spare = _spare()
        self.warned = False

    def accept(self) -> tuple[socket.socket, Any]:
        while True:
            try:
                connection, address = super().accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                self._close_one()
                continue
            self.served = _open(self.served)
            if len(self.served) < self.most_served:
                self.served.append(connection)
                return connection, address
            self._refuse(connection)

    def _refuse(self, connection: socket.socket) -> None:
        """503, and closed a little later; at once where too many are being refused already."""
        if len(self.served) + len(self.refused) >= self.most:
            self.refused = _open(self.refused)
        if len(self.served) + len(self.refused) >= self.most:
            self._warn()
            connection.close()
            return
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.send(REFUSAL)
            connection.shutdown(socket.SHUT_WR)
        self.refused.append(connection)
        asyncio.get_running_loop().call_later(LINGER, connection.close)

    def _close_one(self) -> None:
        """The connection that waits is accepted with the spare descriptor, and closed: otherwise it waits for ever."""
        self._warn()
        if self.spare is not None:
            os.close(self.spare)
            try:
                super().accept()[0].close()
            finally:
                self.spare = _spare()
        if self.spare is None:
            time.sleep(PAUSE)
            self.spare = _spare()
            raise BlockingIOError

    def _warn(self) -> None:
        if not self.warned:
            log.warning("more than %d connections: those beyond are closed; ulimit -n raises the limit", self.most)
        self.warned = True

    def close(self) -> None:
        for connection in self.refused:
            connection.close()
        if self.spare is not None:
            os.close(self.spare)
            self.spare = None
        super().close()


def _open(connections: list[socket.socket]) -> list[socket.socket]:
    return [one for one in connections if one.fileno() >= 0]


def _spare() -> int | None:
    """A descriptor to give up when there is no other; None where there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY)
    except OSError:
        return None
