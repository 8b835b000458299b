"""The HTTP protocol of the server: strict about the form of a request, with deadlines for slow clients.

uvicorn alone waits without end for the rest of a request, so a few hundred idle sockets would keep everybody out.
h11 alone accepts forms that two programs may read differently: bare line feeds, folded headers, two lengths.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LOOSE = re.compile(rb"(?<!\r)\n|\n[ \t]")  # a line feed alone, or a header that goes on in the next line


class Strict(h11.Connection):
    """Refuses a request that has both Content-Length and Transfer-Encoding, or lines that do not end in CR LF."""

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE:
            head = self.trailing_data[0].partition(b"\r\n\r\n")[0]
            if LOOSE.search(head):
                raise h11.RemoteProtocolError("a header line must end in CR LF and may not be folded")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {bytes(name) for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("a request must say its length in one way")
        return event


class Patient(H11Protocol):
    """Deadlines for headers, for bodies, and for readers that do not read."""

    headers_seconds, body_seconds, reading_seconds = 10.0, 30.0, 30.0
    _phase: str = ""
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = Strict(h11.SERVER, self.config.h11_max_incomplete_event_size or 32 << 10)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for("headers")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for({"IDLE": "headers", "SEND_BODY": "body"}.get(str(self.conn.their_state), ""))

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for("")
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.reading_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def _wait_for(self, phase: str) -> None:
        """A phase has one deadline from its first byte; more bytes of the same phase do not move it."""
        if phase == self._phase:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._phase, self._timer = phase, None
        if phase:
            self._timer = self.loop.call_later(getattr(self, f"{phase}_seconds"), self.transport.abort)
