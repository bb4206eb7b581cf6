"""Frames: a fixed header, a msgpack body, then payload bytes that are passed on untouched (`protocol/frames.md`).

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
from enum import IntEnum

import msgspec

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.ledger import Account, MemoryLedger, Reservation

HEADER = struct.Struct("<BBHIII")
HEADER_BYTES = HEADER.size
MAX_BODY_BYTES = 0xFFFF
MAX_PAYLOAD_BYTES = 256 * 1024 * 1024  # the absolute bound of version 1; a link usually sets a lower one
MAX_SEQ = 0xFFFFFFFF
LARGE_BYTES = 16 * 1024  # payloads above this are read straight into a buffer of their own
RECEIVE_BYTES = 96 * 1024  # holds the header, the longest body and the longest payload that is not large
ALLOCATE_BYTES = 4 * 1024 * 1024  # at most this much is allocated on a header's word alone
MAX_GREETING_BYTES = 4096  # of the first frame, from a peer that is not admitted yet


class FrameKind(IntEnum):
    """Kind of a frame in version 1. A frame of an unknown kind can be skipped, since its header has its length."""

    HELLO = 1
    PING = 2
    PONG = 3
    ERROR = 4
    END = 5
    REVOCATIONS = 6
    OPEN = 16
    READY = 17
    ATTACH = 18
    INPUT = 19
    OUTPUT = 20
    FAULT = 21
    RAN = 22
    GET_TRACE = 23
    TRACE = 24
    GET_STATEMENT = 25
    STATEMENT = 26
    TRUNCATE = 27
    RECEIPT = 28
    CLAIM = 29
    KEEP = 30
    LINK_CODEC = 31
    GET_MANIFEST = 32
    MANIFEST = 33
    GET_CHUNKS = 34
    CHUNK = 35
    DRAFTS = 36
    OFFER_ADAPTER = 37
    GET_CACHE = 38
    CACHE = 39
    PROBE = 40
    TOOK_OVER = 41
    FORWARD = 48
    BACKWARD = 49
    LEAD = 50
    STATUS = 51
    BEGIN = 52
    RELEASE = 53
    DISCARD = 54
    REDUCE = 55
    REDUCED = 56
    PART = 57
    COMMIT = 58
    SYNC = 59
    RESTORE = 60
    WORK = 61
    LEASE = 62
    DONE = 63
    FAILED = 64
    STEP = 65
    STOPPED = 66
    PULL = 67
    WAITING = 68
    PROGRESS = 69
    GET_COMMITMENT = 70
    COMMITMENT = 71
    GET_MICROBATCH = 72
    MICROBATCH = 73
    ACCUSATION = 74
    GET_SKETCHES = 75
    SKETCHES = 76
    LABELS = 77
    LIST_STATES = 80
    STATES = 81
    BACK_UP = 82
    INFER = 96
    INFERRED = 97
    OPEN_ADAPTER = 112
    ADAPTER_OPENED = 113
    JOIN_ADAPTER = 114
    TUNE_INPUT = 115
    TUNE_LABELS = 116
    TUNE_GRADIENT = 117
    TUNE_LOSS = 118
    TUNE_COUNTED = 119
    GATHER = 120
    GATHERED = 121
    UPDATE = 122
    UPDATED = 123
    GET_ADAPTER = 124
    ADAPTER_PIECE = 125
    JOIN_TUNING = 126
    TUNING_JOINED = 127
    SHARE_PIECE = 128


class Frame(msgspec.Struct, frozen=True, gc=False):
    """Frame as read. A msgpack struct for its speed: there is one for every token and hop."""

    kind: int
    channel: int
    seq: int
    body: bytes
    payload: bytes | bytearray = b""

    def __repr__(self) -> str:
        name = FrameKind(self.kind).name if self.kind in FrameKind._value2member_map_ else str(self.kind)
        sizes = f"body={len(self.body)}B payload={len(self.payload)}B"
        return f"<Frame {name} channel={self.channel} seq={self.seq} {sizes}>"


def pack_header(kind: int, body_bytes: int, payload_bytes: int, channel: int = 0, seq: int = 0) -> bytes:
    """Return the 16 header bytes. Raises ValueError if a length or number does not fit its field."""
    if body_bytes > MAX_BODY_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(f"frame too large: body of {body_bytes} bytes, payload of {payload_bytes} bytes")
    try:
        return HEADER.pack(kind, 0, body_bytes, payload_bytes, channel, seq)
    except struct.error as error:
        raise ValueError(f"frame field out of range: {error}") from error


class CountedBytes(bytearray):
    """Buffer or payload that counts in the memory ledger until it is garbage-collected."""

    def __init__(self, size_bytes: int, reservation: Reservation) -> None:
        self._reservation = reservation
        super().__init__(size_bytes)

    def __del__(self) -> None:
        self._reservation.release()


class FrameReader:
    """Reader that turns bytes into frames, in order; it checks every length against its bound before it keeps a byte.

    The reader's own buffer and large payloads count in the ledger until they are freed. The first ALLOCATE_BYTES of each payload
    are always taken, so that work in progress goes on when memory is short; `room` raises Full if there is no memory for more.

    Bytes are best read straight into `room()` and announced by `advance`: a large payload is then never copied. After an error
    every further call raises the same error, since the stream has lost its place.

    `greeted` is False if the first frame will be a greeting, which is bounded by MAX_GREETING_BYTES.
    """

    def __init__(
        self, max_payload_bytes: int = MAX_PAYLOAD_BYTES, ledger: MemoryLedger | None = None, *, greeted: bool = True
    ) -> None:
        self.max_payload_bytes = min(max_payload_bytes, MAX_PAYLOAD_BYTES)
        self._greeted = greeted
        self._ledger = ledger or MemoryLedger()
        self._buffer = memoryview(CountedBytes(RECEIVE_BYTES, self._ledger.count(Account.MESSAGES, RECEIVE_BYTES)))
        self._held_bytes = 0  # bytes of an incomplete frame at the start of the buffer
        self._large: _LargeFrame | None = None
        self._fault = ""  # not the error itself, whose traceback would keep the buffer

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame. If not 0 at the end of a stream, the stream was cut."""
        return self._held_bytes + (self._large.held_bytes if self._large else 0)

    def room(self) -> memoryview:
        """Return the buffer for the next bytes of the stream, never empty. Raises Full if a payload grows and memory is short; the
        call may be repeated."""
        return self._buffer[self._held_bytes :] if self._large is None else self._large.room()

    def advance(self, count: int) -> Iterator[Frame]:
        """Take `count` bytes put into `room()`, and yield the frames that they complete. Raises ProtocolError (TOO_LARGE) on a
        length over its bound."""
        if self._fault:
            raise self._too_large()
        if self._large is None:
            yield from self._parse(self._held_bytes + count)
            return
        self._large.filled_bytes += count
        if self._large.complete:
            frame, self._large = self._large.frame(), None
            yield frame

    def give_up(self) -> None:
        """Drop the incomplete frame and the buffers, as no more bytes will come."""
        self._large, self._held_bytes, self._buffer = None, 0, memoryview(b"")

    def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
        """Copy `data` into the reader and yield the frames that it completes. Raises as `room` and `advance`."""
        view = memoryview(data)
        if self._fault:
            raise self._too_large()
        while view:
            room = self.room()
            count = min(len(view), len(room))
            room[:count] = view[:count]
            view = view[count:]
            yield from self.advance(count)

    def _parse(self, end: int) -> Iterator[Frame]:
        """Yield the frames in the buffer's first `end` bytes. The rest moves to the buffer's start, or begins a large frame."""
        position = 0  # and no variable for the buffer, which an error's traceback would keep
        while end - position >= HEADER_BYTES:
            kind, _flags, body_bytes, payload_bytes, channel, seq = HEADER.unpack_from(self._buffer, position)
            if not self._greeted and body_bytes + payload_bytes > MAX_GREETING_BYTES:
                raise self._lose_place("greeting", body_bytes + payload_bytes, MAX_GREETING_BYTES)
            if payload_bytes > self.max_payload_bytes:
                raise self._lose_place("payload", payload_bytes, self.max_payload_bytes)
            body_at = position + HEADER_BYTES
            payload_at = body_at + body_bytes
            frame_end = payload_at + payload_bytes
            if frame_end <= end:
                self._greeted = True
                payload = bytes(self._buffer[payload_at:frame_end])
                yield Frame(kind, channel, seq, bytes(self._buffer[body_at:payload_at]), payload)
                position = frame_end
            elif payload_bytes > LARGE_BYTES and payload_at <= end:
                body = bytes(self._buffer[body_at:payload_at])
                beginning = self._buffer[payload_at:end]
                self._large = _LargeFrame(kind, channel, seq, body, payload_bytes, beginning, self._ledger)
                position = end
            else:
                break
        self._held_bytes = end - position
        self._buffer[: self._held_bytes] = self._buffer[position:end]

    def _lose_place(self, what: str, size_bytes: int, bound_bytes: int) -> ProtocolError:
        self._fault = f"a frame announces a {what} of {size_bytes} bytes; the bound here is {bound_bytes}"
        return self._too_large()

    def _too_large(self) -> ProtocolError:
        return ProtocolError(self._fault, code=ErrorCode.TOO_LARGE)


class _LargeFrame:
    """A frame whose payload is being read. Memory grows with the bytes received, so that a false header costs little."""

    def __init__(
        self,
        kind: int,
        channel: int,
        seq: int,
        body: bytes,
        payload_bytes: int,
        beginning: memoryview,
        ledger: MemoryLedger,
    ) -> None:
        self._head = (kind, channel, seq, body)
        self._payload_bytes = payload_bytes
        self._ledger = ledger
        first_bytes = min(payload_bytes, ALLOCATE_BYTES)
        self._payload = CountedBytes(first_bytes, ledger.count(Account.MESSAGES, first_bytes))
        self._payload[: len(beginning)] = beginning
        self.filled_bytes = len(beginning)

    @property
    def held_bytes(self) -> int:
        return len(self._payload)

    @property
    def complete(self) -> bool:
        return self.filled_bytes == self._payload_bytes

    def room(self) -> memoryview:
        if self.filled_bytes == len(self._payload):
            # Not resized in place: the caller that filled it may still hold views of it.
            size_bytes = min(self._payload_bytes, 2 * len(self._payload))
            grown = CountedBytes(size_bytes, self._ledger.reserve(Account.MESSAGES, size_bytes))
            grown[: self.filled_bytes] = self._payload
            self._payload = grown
        return memoryview(self._payload)[self.filled_bytes :]

    def frame(self) -> Frame:
        return Frame(*self._head, self._payload)
