"""Bodies of frames: one msgpack array per kind (`protocol/frames.md`).

Bodies are arrays, so that a decode step costs few bytes. Newer versions append fields: a reader ignores trailing
elements that it does not know, and missing trailing fields take their defaults.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TypeVar

import msgspec

from swarmnode.codec.decoding import DECODE_ERRORS
from swarmnode.codec.frames import Kind
from swarmnode.codec.tensors import TensorInfo
from swarmnode.errors import ErrorCode, ProtocolError

VERSION = 1
SESSION_ID_BYTES = 16
MAX_ROUTE_HOPS = 256
MAX_ROWS = 256
MAX_STOP_IDS = 64


class Body(msgspec.Struct, array_like=True, frozen=True):
    """Base of all bodies."""


class Hello(Body, frozen=True):
    """First frame of both sides of every link. `proof` is for the membership of private swarms."""

    version: int
    swarm: bytes  # 32 bytes: the swarm id
    software: str = ""
    proof: bytes = b""


class Ping(Body, frozen=True):
    """Answered at once by PONG with the same seq; the sender measures the round trip."""


class Pong(Body, frozen=True):
    """Answer to PING."""


class Error(Body, frozen=True):
    """An error of the frame's channel (channel 0: of the whole link). Text is never sent: the code has a fixed one."""

    code: int
    retry_s: float = 0.0


class End(Body, frozen=True):
    """The channel (or on channel 0 the link) is finished in order. A stream that ends without it was cut."""


class Mode(IntEnum):
    """Who decides the next token."""

    RING = 0  # the last hop samples and the first hop is fed at once
    DRIVEN = 1  # the client drives every step


class HopSpec(Body, frozen=True):
    """One hop of a route: the peer and the units [start, end) that it computes there."""

    peer: str
    start: int
    end: int


class Sampling(Body, frozen=True):
    """How the last hop draws tokens in RING mode. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    The draw is a pure function of (logits, these parameters, row, position), so that a replay draws the same.
    """

    prompt_length: int
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()


class Open(Body, frozen=True):
    """Opens a session at a hop, or moves it to a newer epoch. The frame's channel carries its INPUT frames from now on.

    Travels hop to hop along `route`; `index` is the receiver's own place in it. `max_length` is the number of positions
    for which the hop reserves cache. `padding` holds, per row, how many of the first positions are left padding.
    """

    session: bytes
    epoch: int
    route: tuple[HopSpec, ...]
    index: int
    mode: int
    rows: int
    max_length: int
    codec: int = 0
    sampling: Sampling | None = None
    padding: tuple[int, ...] = ()
    known: int = 0  # the client has the outputs for positions below this: a replay need not produce them again


class Ready(Body, frozen=True):
    """Answer to OPEN on the same channel: the hop holds positions [0, have) of the session."""

    have: int


class Attach(Body, frozen=True):
    """Subscribes the frame's channel to the outputs of a session at its last hop, from position `start` on."""

    session: bytes
    epoch: int
    start: int = 0


class Want(IntEnum):
    """Which outputs of an INPUT the last hop shall produce."""

    NOTHING = 0
    LAST = 1  # of the last position
    ALL = 2


class Input(Body, frozen=True):
    """Positions [seq, seq + T) of a session: the payload is ids_BT (int64 or int32) at the first hop, hidden_BTH after it.

    `reorder`, where not empty, permutes the rows of the cache before the input is used (beam search).
    """

    tensor: TensorInfo
    want: int = 0
    reorder: tuple[int, ...] = ()


class Output(Body, frozen=True):
    """What the last hop made of the position before `seq`. RING: `ids` are the tokens at position `seq`, one per row.

    DRIVEN: the payload described by `tensor` (logits_BTV or hidden_BTH), whose last position is seq - 1.
    `final` says that nothing follows (a stop token, or max_new_tokens reached).
    """

    ids: tuple[int, ...] = ()
    final: bool = False
    tensor: TensorInfo | None = None


class Fault(Body, frozen=True):
    """Travels upstream to the client: hop `index` of the route of `epoch` cannot go on, for the reason `code`."""

    epoch: int
    index: int
    code: int
    retry_s: float = 0.0


class GetManifest(Body, frozen=True):
    """Asks for the manifest of the swarm named in HELLO."""


class Manifest(Body, frozen=True):
    """The payload is the manifest; its SHA-256 is the swarm id."""


class GetChunks(Body, frozen=True):
    """Asks for `count` chunks of the file with this root, from number `first` on; count 0 asks for the chunk hash list."""

    root: bytes
    first: int
    count: int


class Chunk(Body, frozen=True):
    """One chunk (number `seq`); or with `hashes` true the file's whole list of chunk hashes, 32 bytes each."""

    hashes: bool = False


BODIES: dict[Kind, type[Body]] = {
    Kind.HELLO: Hello,
    Kind.PING: Ping,
    Kind.PONG: Pong,
    Kind.ERROR: Error,
    Kind.END: End,
    Kind.OPEN: Open,
    Kind.READY: Ready,
    Kind.ATTACH: Attach,
    Kind.INPUT: Input,
    Kind.OUTPUT: Output,
    Kind.FAULT: Fault,
    Kind.GET_MANIFEST: GetManifest,
    Kind.MANIFEST: Manifest,
    Kind.GET_CHUNKS: GetChunks,
    Kind.CHUNK: Chunk,
}
KIND_OF: dict[type[Body], Kind] = {body: kind for kind, body in BODIES.items()}

_encoder = msgspec.msgpack.Encoder()
_decoders = {kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}
_EMPTY = {kind: kind in (Kind.PING, Kind.PONG, Kind.END, Kind.GET_MANIFEST, Kind.MANIFEST) for kind in BODIES}

BodyT = TypeVar("BodyT", bound=Body)


def encode_body(body: Body) -> bytes:
    """The msgpack bytes of a body; a body without fields is zero bytes."""
    return b"" if _EMPTY[KIND_OF[type(body)]] else _encoder.encode(body)


def decode_body(kind: int, data: bytes | bytearray | memoryview) -> Body:
    """The body of a frame of a known kind. Raises ProtocolError (MALFORMED) where the bytes are not one."""
    try:
        known = Kind(kind)
    except ValueError:
        raise ProtocolError(f"unknown frame kind {kind}", code=ErrorCode.MALFORMED) from None
    if not data and _EMPTY[known]:
        return BODIES[known]()
    try:
        body: Body = _decoders[known].decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"bad {known.name} body: {error}", code=ErrorCode.MALFORMED) from None
    return body
