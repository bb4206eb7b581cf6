"""HTTP/1.1 as uvicorn reads it, with bounds: its parser keeps heads and trailers of any size, and waits for them for ever."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 1 << 16  # and as much again as one read brings
HEAD_S = 30.0  # for a head to arrive, also the first one of a connection
FRAMING = 8  # bytes that a chunked body may take on the wire for one of its own: a chunk of one byte takes 6


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]  # uvicorn's is narrower than asyncio's
        self._beside_bytes = 0  # bodies, of the request that comes in
        self._overdue: asyncio.TimerHandle | None = None
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Of whatever part of a request."""
        self._beside_bytes += len(data)
        super().data_received(data)
        if self._beside_bytes > MAX_HEAD_BYTES:
            self._refuse(f"The head of a request may have {MAX_HEAD_BYTES} bytes.")
        elif not self._is_answering:
            self._await_head()

    def on_message_begin(self) -> None:
        self._beside_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_waiting()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_bytes -= FRAMING * len(body)
        super().on_body(body)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_head(self) -> None:
        if self._overdue is None and not self.transport.is_closing():
            self._overdue = self.loop.call_later(HEAD_S, self._refuse, "The request did not arrive in time.")

    def _stop_waiting(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _refuse(self, sentence: str) -> None:
        """End the connection; in words, where no answer is under way."""
        if self.transport.is_closing():
            return
        if self._is_answering:
            self.transport.close()
        else:
            self.send_400_response(sentence)
