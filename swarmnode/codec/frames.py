"""Frames: a fixed header, a msgpack body, then payload bytes that nobody touches (`protocol/frames.md`).

    offset  size  field
    0       1     kind
    1       1     flags           (0 in version 1; readers ignore bits that they do not know)
    2       2     body length     bytes, little-endian as every field
    4       4     payload length  bytes
    8       4     channel         0 is the link itself; the opener of a conversation picks its number
    12      4     seq             meaning depends on the kind (positions, request numbers)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from swarmnode.errors import ErrorCode, ProtocolError

HEADER = struct.Struct("<BBHIII")
HEADER_BYTES = HEADER.size
MAX_BODY_BYTES = 0xFFFF
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024  # the absolute bound of version 1; a link usually sets a lower one
MAX_SEQ = 0xFFFFFFFF


class Kind(IntEnum):
    """Frame kinds of version 1. Even when unknown, a frame can be skipped: its header tells its length."""

    HELLO = 1
    PING = 2
    PONG = 3
    ERROR = 4
    END = 5
    OPEN = 16
    READY = 17
    ATTACH = 18
    INPUT = 19
    OUTPUT = 20
    FAULT = 21
    GET_MANIFEST = 32
    MANIFEST = 33
    GET_CHUNKS = 34
    CHUNK = 35


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame as read. `payload` is a view that stays valid as long as the frame is referenced."""

    kind: int
    channel: int
    seq: int
    body: bytes | bytearray | memoryview
    payload: bytes | bytearray | memoryview = b""

    def __repr__(self) -> str:
        name = Kind(self.kind).name if self.kind in Kind._value2member_map_ else str(self.kind)
        return f"<Frame {name} channel={self.channel} seq={self.seq} body={len(self.body)}B payload={len(self.payload)}B>"


def pack_header(kind: int, body_bytes: int, payload_bytes: int, channel: int = 0, seq: int = 0) -> bytes:
    """The 16 header bytes. Raises ValueError where a length or number does not fit its field."""
    if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame too large: body of {body_bytes} bytes, payload of {payload_bytes} bytes")
    try:
        return HEADER.pack(kind, 0, body_bytes, payload_bytes, channel, seq)
    except struct.error as error:
        raise ValueError(f"frame field out of range: {error}") from error


class FrameReader:
    """Bytes in, frames out, in order; checks every length against the bound before it keeps a byte of it.

    After an error the reader is poisoned: every further call raises the same error, since the stream has lost its place.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = min(max_payload_bytes, MAX_PAYLOAD_BYTES)
        self._buffer = bytearray()
        self._error: ProtocolError | None = None

    def __repr__(self) -> str:
        return f"<FrameReader holding {len(self._buffer)} bytes>"

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame. Not zero at the end of a stream means that it was cut."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Raises ProtocolError (TOO_LARGE) on a length over its bound."""
        self._buffer += data
        while True:
            frame = self._next()
            if frame is None:
                return
            yield frame

    def _next(self) -> Frame | None:
        if self._error is not None:
            raise self._error
        if len(self._buffer) < HEADER_BYTES:
            return None
        kind, _flags, body_bytes, payload_bytes, channel, seq = HEADER.unpack_from(self._buffer)
        if payload_bytes > self.max_payload_bytes:
            self._error = ProtocolError(
                f"a frame announces a payload of {payload_bytes} bytes; the bound here is {self.max_payload_bytes}",
                code=ErrorCode.TOO_LARGE,
            )
            raise self._error
        end = HEADER_BYTES + body_bytes + payload_bytes
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + body_bytes])
        payload = bytes(self._buffer[HEADER_BYTES + body_bytes : end])
        del self._buffer[:end]
        return Frame(kind, channel, seq, body, payload)
