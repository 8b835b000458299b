"""Slow clients are closed: a protocol with a deadline for headers, for bodies, and for readers that do not read.

uvicorn alone waits without end for the rest of a request, so a few hundred idle sockets would keep everybody out.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class Patient(H11Protocol):
    headers_seconds, body_seconds, reading_seconds = 10.0, 30.0, 30.0
    _phase: str = ""
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

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
        seconds = {"headers": self.headers_seconds, "body": self.body_seconds}
        self._phase, self._timer = phase, None
        if phase:
            self._timer = self.loop.call_later(seconds[phase], self.transport.abort)
