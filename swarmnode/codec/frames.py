"""Frames: a fixed header, a msgpack body, then payload bytes that nobody touches (`protocol/frames.md`).

    offset  size  field
    0       1     kind
    1       1     flags           (0 in version 1; readers ignore bits that they do not know)
    2       2     body length     bytes
    4       4     payload length  bytes
    8       4     channel         0 is the link itself; the opener of a conversation picks its number
    12      4     seq             meaning depends on the kind (positions, request numbers)

All fields are unsigned and little-endian.
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
LARGE_BYTES = 64 * 1024  # payloads above this get a buffer of their own
ALLOCATE_BYTES = 4 * 1024 * 1024  # at most this much is allocated on a header's word alone


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
        sizes = f"body={len(self.body)}B payload={len(self.payload)}B"
        return f"<Frame {name} channel={self.channel} seq={self.seq} {sizes}>"


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

    A large payload is gathered in a buffer of its own, so its bytes are copied once. After an error the reader is
    poisoned: every further call raises the same error, since the stream has lost its place.
    """

    def __init__(self, max_payload_bytes: int = MAX_PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = min(max_payload_bytes, MAX_PAYLOAD_BYTES)
        self._rest = b""  # of a frame whose header, body or small payload is not complete
        self._large: _LargeFrame | None = None
        self._error: ProtocolError | None = None

    def __repr__(self) -> str:
        return f"<FrameReader holding {self.pending_bytes} bytes>"

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame. Not zero at the end of a stream means that it was cut."""
        return len(self._rest) + (self._large.held_bytes if self._large else 0)

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Yield the frames that `data` completes. Raises ProtocolError (TOO_LARGE) on a length over its bound."""
        if self._error is not None:
            raise self._error
        view, position = memoryview(data), 0
        if self._rest:
            view, self._rest = memoryview(self._rest + bytes(view)), b""
        while True:
            if self._large is not None:
                position += self._large.fill(view[position:])
                if not self._large.complete:
                    return
                frame, self._large = self._large.frame(), None
                yield frame
            elif (end := self._end_of_small(view, position)) is None:
                self._rest = bytes(view[position:])
                return
            elif self._large is None:
                yield self._small(view, position)
                position = end
            else:
                position = end

    def _end_of_small(self, view: memoryview, position: int) -> int | None:
        """Where the frame at `position` ends, or the body of a large one (which is then begun); None if it is not all here."""
        if len(view) - position < HEADER_BYTES:
            return None
        kind, _flags, body_bytes, payload_bytes, channel, seq = HEADER.unpack_from(view, position)
        if payload_bytes > self.max_payload_bytes:
            self._error = ProtocolError(
                f"a frame announces a payload of {payload_bytes} bytes; the bound here is {self.max_payload_bytes}",
                code=ErrorCode.TOO_LARGE,
            )
            raise self._error
        large = payload_bytes > LARGE_BYTES
        start = position + HEADER_BYTES
        end: int = start + body_bytes + (0 if large else payload_bytes)
        if len(view) < end:
            return None
        if large:
            self._large = _LargeFrame(kind, channel, seq, bytes(view[start:end]), payload_bytes)
        return end

    @staticmethod
    def _small(view: memoryview, position: int) -> Frame:
        kind, _flags, body_bytes, payload_bytes, channel, seq = HEADER.unpack_from(view, position)
        middle = position + HEADER_BYTES + body_bytes
        body = bytes(view[position + HEADER_BYTES : middle])
        return Frame(kind, channel, seq, body, bytes(view[middle : middle + payload_bytes]))


class _LargeFrame:
    """A frame whose payload is being gathered. Memory follows what has come, so that a lying header costs nothing."""

    def __init__(self, kind: int, channel: int, seq: int, body: bytes, payload_bytes: int) -> None:
        self._head = (kind, channel, seq, body)
        self._payload_bytes = payload_bytes
        self._payload = bytearray(min(payload_bytes, ALLOCATE_BYTES))
        self._filled = 0

    @property
    def held_bytes(self) -> int:
        return len(self._payload)

    @property
    def complete(self) -> bool:
        return self._filled == self._payload_bytes

    def fill(self, view: memoryview) -> int:
        """Take what belongs to this frame; how many bytes that was."""
        size = min(len(view), self._payload_bytes - self._filled)
        end = self._filled + size
        if end > len(self._payload):
            grown = min(self._payload_bytes, max(end, 2 * len(self._payload)))
            self._payload.extend(bytes(grown - len(self._payload)))
        self._payload[self._filled : end] = view[:size]
        self._filled = end
        return size

    def frame(self) -> Frame:
        return Frame(*self._head, self._payload)
