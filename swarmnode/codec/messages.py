"""Bodies of links, sessions and file transfers, and the table of all kinds of frames (`protocol/frames.md`).

Bodies are arrays, so that a decode step costs few bytes. Newer versions append fields: a reader ignores trailing
elements that it does not know, and missing trailing fields take their defaults.

The bound of a single field stands in its type, where msgspec checks it while decoding; what ties fields together is in
`check`.
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.audit_messages import AUDIT_BODIES
from swarmnode.codec.body import (
    DECODE_ERRORS,
    MAX_ADAPTER_CHARS,
    MAX_CHUNKS,
    MAX_CODE,
    MAX_LINK_CODECS,
    MAX_POSITIONS,
    MAX_PROOF_BYTES,
    MAX_RATE_BPS,
    MAX_REVOCATIONS_BYTES,
    MAX_ROUTE_HOPS,
    MAX_ROWS,
    MAX_SOFTWARE_CHARS,
    SWARM_ID_BYTES,
    Body,
    Code,
    Epoch,
    HopIndex,
    HopSpec,
    Position,
    RetrySeconds,
    Root,
    Row,
    SessionId,
    TokenId,
    Unit,
)
from swarmnode.codec.credit_messages import CREDIT_BODIES
from swarmnode.codec.frames import MAX_SEQ, FrameKind
from swarmnode.codec.inference_messages import INFERENCE_BODIES
from swarmnode.codec.measuring_messages import MEASURING_BODIES, TRACE_BODIES
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.spot_check_messages import SPOT_CHECK_BODIES
from swarmnode.codec.state_messages import STATE_BODIES
from swarmnode.codec.tensors import FLOAT_DTYPES, ID_DTYPES, Codec, TensorInfo, check_tensor
from swarmnode.codec.training_fields import check_route, check_rules
from swarmnode.codec.training_messages import TRAINING_BODIES
from swarmnode.errors import ProtocolError

PROOF_BYTES = 32
BRANCH_DOMAIN = b"swarmnode-branch-1\0"
_PLACE = struct.Struct("<II")


class Branch(Body, frozen=True):
    """The first `length` positions are another session's. `proof` shows which one to a hop that has it, and nothing to others."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]


def branch_proof(source: bytes, truncations: int, session: bytes, length: int) -> bytes:
    """That whoever opens `session` knows the id of its source, as that was after so many truncations: the SHA-256 of both ids and
    both numbers. It is of use for this one session, and for no text that the source had before or has after."""
    return hashlib.sha256(BRANCH_DOMAIN + source + session + _PLACE.pack(truncations, length)).digest()


class Hello(Body, frozen=True):
    """First frame of both sides of every link: the oldest `version` of the protocol that the sender still speaks, and the `newest`
    (0: the same). `proof` is for the membership of private swarms."""

    version: Annotated[int, Meta(ge=1, le=MAX_CODE)]
    swarm: Annotated[bytes, Meta(min_length=SWARM_ID_BYTES, max_length=SWARM_ID_BYTES)]
    software: Annotated[str, Meta(max_length=MAX_SOFTWARE_CHARS)] = ""
    proof: Annotated[bytes, Meta(max_length=MAX_PROOF_BYTES)] = b""
    newest: Annotated[int, Meta(ge=0, le=MAX_CODE)] = 0

    @property
    def spoken(self) -> tuple[int, int]:
        """The oldest and the newest version that the sender speaks."""
        return self.version, max(self.version, self.newest)


class Ping(Body, frozen=True):
    """Answered at once by PONG with the same seq; the sender measures the round trip."""


class Pong(Body, frozen=True):
    """Answer to PING. `received_bps`: how fast the asker's large frames came in lately, bits/s; 0 where none has."""

    received_bps: Annotated[float, Meta(ge=0, le=MAX_RATE_BPS)] = 0.0


class Error(Body, frozen=True):
    """An error of the frame's channel (channel 0: of the whole link). Text is never sent: the code has a fixed one."""

    code: Code
    retry_s: RetrySeconds = 0.0


class End(Body, frozen=True):
    """The channel (or on channel 0 the link) is finished in order. A stream that ends without it was cut."""


class Revocations(Body, frozen=True):
    """Which of the owner's revocation lists we follow (0: none yet); with `signed` the list itself, for who has an older one."""

    number: Annotated[int, Meta(ge=0, le=MAX_SEQ)]
    signed: Annotated[bytes, Meta(max_length=MAX_REVOCATIONS_BYTES)] = b""


class Mode(IntEnum):
    """Who decides the next token."""

    RING = 0  # the last hop samples and the first hop is fed at once
    DRIVEN = 1  # the client drives every step


class LinkCodec(Body, frozen=True):
    """From position `start` of a session on, the states that enter unit `unit` travel as `codec`. A hop tells the client what it
    has chosen, upstream; in OPEN the client tells it to whoever sends these positions again."""

    unit: Unit
    start: Position
    codec: Code

    def check(self) -> None:
        if self.codec not in Codec._value2member_map_:
            raise ProtocolError(f"a LINK_CODEC needs a codec of this version, not {self.codec}")


class Open(Body, frozen=True):
    """Opens a session at a hop, or moves it to a newer epoch. The frame's channel carries its INPUT frames from now on.

    Travels hop to hop along `route`; `index` is the receiver's own place in it. `max_length` is the number of positions
    for which the hop reserves cache. `padding` holds, per row, how many of the first positions are left padding. The payload is
    the text so far, for the penalties of `sampling`: ids_T (int32), as many as its `text_length`.

    States between hops travel as `codec`, but for what `codecs` says. Where it `adapts`, each hop chooses for what comes next.
    """

    session: SessionId
    epoch: Epoch
    route: Annotated[tuple[HopSpec, ...], Meta(min_length=1, max_length=MAX_ROUTE_HOPS)]
    index: HopIndex
    mode: Code
    rows: Annotated[int, Meta(ge=1, le=MAX_ROWS)]
    max_length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]
    codec: Code = 0
    sampling: Sampling | None = None
    padding: Annotated[tuple[Position, ...], Meta(max_length=MAX_ROWS)] = ()
    known: Position = 0  # the client has the outputs for positions below this: a replay need not produce them again
    truncate: Truncate | None = None  # before anything else: another text begins as the session's does
    codecs: Annotated[tuple[LinkCodec, ...], Meta(max_length=MAX_LINK_CODECS)] = ()
    adapts: bool = False
    adapter: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)] = ""  # of the swarm, which changes the model
    branch: Branch | None = None  # as which other session this one begins, where it is new to a hop

    def check(self) -> None:
        check_route("OPEN", self.route, self.index)
        rules = {
            "a mode of this version": self.mode in Mode._value2member_map_,
            "codecs of this version": {self.codec, *(one.codec for one in self.codecs)}
            <= Codec._value2member_map_.keys(),
            "sampling and one row in RING mode": self.mode != Mode.RING
            or (self.sampling is not None and self.rows == 1),
            "padding of no row or of each": len(self.padding) in (0, self.rows),
            "padding inside the session": max(self.padding, default=0) < self.max_length,
            "known outputs inside the session": self.known <= self.max_length,
            "a branch in RING mode, shorter than the session": self.branch is None
            or (self.mode == Mode.RING and self.branch.length < self.max_length),
        }
        check_rules("OPEN", rules)
        if self.sampling is not None:
            self.sampling.check()


class Ready(Body, frozen=True):
    """Answer to OPEN on the same channel: the hop holds positions [0, have) of the session."""

    have: Position


class Attach(Body, frozen=True):
    """Subscribes the frame's channel to the outputs of a session at its last hop, from position `start` on."""

    session: SessionId
    epoch: Epoch
    start: Position = 0


class Want(IntEnum):
    """Which outputs of an INPUT the last hop shall produce."""

    NOTHING = 0
    LAST = 1  # of the last position
    ALL = 2


_INPUT_DTYPES = {2: ID_DTYPES, 3: FLOAT_DTYPES}  # by rank


class Input(Body, frozen=True):
    """Positions [seq, seq + T) of a session: the payload is ids_BT (int64 or int32) where the route begins with unit 0,
    hidden_BTH everywhere else.

    `reorder`, where not empty, says for each row of the cache which row it continues (beam search), before the input.
    """

    tensor: TensorInfo
    want: Code = 0
    reorder: Annotated[tuple[Row, ...], Meta(max_length=MAX_ROWS)] = ()

    def check(self) -> None:  # on the path of every token: keep it short
        info = self.tensor
        check_tensor(info)
        if info.dtype not in _INPUT_DTYPES.get(len(info.shape), ()):
            raise ProtocolError(f"an INPUT needs ids [rows, positions] or floats [rows, positions, width], not {info}")
        if self.want > Want.ALL:
            raise ProtocolError(f"an INPUT wants {self.want}, which this version does not know")
        if self.reorder and (len(self.reorder) != info.shape[0] or max(self.reorder) >= info.shape[0]):
            raise ProtocolError(f"an INPUT of {info.shape[0]} rows reorders them as {self.reorder}")


class Truncate(Body, frozen=True):
    """Before an INPUT: the positions from `to` on are forgotten, drafts that were rejected for example. `number` counts these
    frames over a session's life, so that one that comes again, after a fault, changes nothing."""

    number: Annotated[int, Meta(ge=1, le=MAX_SEQ)]
    to: Position


class KeepCache(Body, frozen=True):
    """Nothing follows for now: the session's cache stays while there is room, for a text that begins as this one does."""


class Output(Body, frozen=True):
    """What the last hop made of the position before `seq`. RING: `ids` are the tokens at position `seq`, one per row.

    Where `logprobs` are wanted the payload tells them (`codec/sampling.py`).

    DRIVEN: the payload described by `tensor` (logits_BTV or hidden_BTH), whose last position is seq - 1.
    `final` says that nothing follows (a stop token, or max_new_tokens reached).
    """

    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ROWS)] = ()
    final: bool = False
    tensor: TensorInfo | None = None

    def check(self) -> None:
        if bool(self.ids) == (self.tensor is not None):
            raise ProtocolError("an OUTPUT needs either ids or a tensor")
        if self.tensor is not None:
            check_tensor(self.tensor)
            if len(self.tensor.shape) != 3 or self.tensor.dtype not in FLOAT_DTYPES:
                raise ProtocolError(f"an OUTPUT needs floats [rows, positions, width], not {self.tensor}")


class Fault(Body, frozen=True):
    """Travels upstream to the client: hop `index` of the route of `epoch` cannot go on, for the reason `code`."""

    epoch: Epoch
    index: HopIndex
    code: Code
    retry_s: RetrySeconds = 0.0


class GetManifest(Body, frozen=True):
    """Asks for the manifest of the swarm named in HELLO."""


class ManifestReply(Body, frozen=True):
    """The payload is the manifest; its SHA-256 is the swarm id."""


class GetChunks(Body, frozen=True):
    """Asks for `count` chunks of the file with this root, from number `first` on; count 0 asks for its chunk hashes."""

    root: Root
    first: Annotated[int, Meta(ge=0, le=MAX_SEQ)]
    count: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]


class Chunk(Body, frozen=True):
    """One chunk (number `seq`); or with `hashes` true the file's whole list of chunk hashes, 32 bytes each."""

    hashes: bool = False


BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.HELLO: Hello,
    FrameKind.PING: Ping,
    FrameKind.PONG: Pong,
    FrameKind.ERROR: Error,
    FrameKind.END: End,
    FrameKind.REVOCATIONS: Revocations,
    FrameKind.OPEN: Open,
    FrameKind.READY: Ready,
    FrameKind.ATTACH: Attach,
    FrameKind.INPUT: Input,
    FrameKind.TRUNCATE: Truncate,
    FrameKind.KEEP: KeepCache,
    FrameKind.LINK_CODEC: LinkCodec,
    FrameKind.OUTPUT: Output,
    FrameKind.FAULT: Fault,
    FrameKind.GET_MANIFEST: GetManifest,
    FrameKind.MANIFEST: ManifestReply,
    FrameKind.GET_CHUNKS: GetChunks,
    FrameKind.CHUNK: Chunk,
    **MEASURING_BODIES,
    **TRACE_BODIES,
    **AUDIT_BODIES,
    **CREDIT_BODIES,
    **TRAINING_BODIES,
    **SPOT_CHECK_BODIES,
    **STATE_BODIES,
    **INFERENCE_BODIES,
}
KIND_OF: dict[type[Body], FrameKind] = {body: kind for kind, body in BODIES.items()}

_encoder = msgspec.msgpack.Encoder()
_decoders = {int(kind): msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}
_EMPTY: dict[int, Body] = {
    int(KIND_OF[body]): body() for body in (Ping, Pong, End, KeepCache, GetManifest, ManifestReply)
}


def encode_body(body: Body) -> bytes:
    """The msgpack bytes of a body; one that needs no fields and has none set is zero bytes."""
    return b"" if body == _EMPTY.get(KIND_OF[type(body)]) else _encoder.encode(body)


def decode_body(kind: int, data: bytes | bytearray | memoryview) -> Body:
    """The body of a frame of a known kind. Raises ProtocolError: MALFORMED; TOO_LARGE for a tensor over its bound."""
    decoder = _decoders.get(kind)
    if decoder is None:
        raise ProtocolError(f"unknown frame kind {kind}")
    if not data and kind in _EMPTY:
        return _EMPTY[kind]
    try:
        body: Body = decoder.decode(data)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"bad {FrameKind(kind).name} body: {error}") from None
    body.check()
    return body
