"""Bodies of links, sessions and file transfers, and the table of all kinds of frames (`protocol/frames.md`).

Bodies are arrays, so that a decode step takes few bytes. Newer versions append fields: a reader ignores unknown trailing elements,
and missing trailing fields take their defaults.

The type of a field has its bound, which msgspec checks while decoding; `check` has the rules between fields.

Bodies of `/swarmnode/infer/1`: forward passes through layers of a graph (`protocol/frames.md`).

INFER, INFERRED             the question and its answer; ERROR from a peer that cannot, or has no room now

Bodies of `/swarmnode/state/1`, the training states of a peer, and of `/swarmnode/backup/1`, backups for other peers
(`protocol/frames.md`). The bytes travel as chunks.

LIST_STATES                 the question
STATES, STATES, ... END     the answer, in as many frames as its entries need
GET_CHUNKS, CHUNK           as for the files of a manifest; the root is an entry's
BACK_UP, END                on the other protocol: a request to keep a state, and the answer once it is on the disk

Bodies of `/swarmnode/credit/1`: signed receipts of clients for work done for them (`protocol/frames.md`).

RECEIPT    answered with END if it is kept; ERROR REFUSED if it claims more than was done
CLAIM      on `/swarmnode/claim/1`: receipts of a node, for a client of the same owner; answered likewise
"""

from __future__ import annotations

import hashlib
import struct
from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.audit_messages import AUDIT_BODIES, SPOT_CHECK_BODIES
from swarmnode.codec.body import (
    DECODE_ERRORS,
    MAX_ADAPTER_CHARS,
    MAX_ADAPTER_RECORD_BYTES,
    MAX_CHUNKS,
    MAX_CODE,
    MAX_DRAFTS,
    MAX_LINK_CODECS,
    MAX_PEER_CHARS,
    MAX_POSITIONS,
    MAX_PROOF_BYTES,
    MAX_PROPOSER_CHARS,
    MAX_PROPOSERS,
    MAX_RATE_BPS,
    MAX_REVOCATIONS_BYTES,
    MAX_ROUTE_HOPS,
    MAX_ROWS,
    MAX_SIGNATURE_BYTES,
    MAX_SOFTWARE_CHARS,
    ROOT_BYTES,
    SESSION_ID_BYTES,
    SWARM_ID_BYTES,
    Block,
    Body,
    Code,
    Epoch,
    HopIndex,
    HopSpec,
    Position,
    RetrySeconds,
    Root,
    Row,
    RunBytes,
    SessionId,
    Step,
    TokenId,
    Turn,
    Unit,
)
from swarmnode.codec.frames import MAX_SEQ, FrameKind
from swarmnode.codec.handover_messages import HANDOVER_BODIES, MAX_LEAVING
from swarmnode.codec.measuring_messages import MEASURING_BODIES, TRACE_BODIES
from swarmnode.codec.sampling import Sampling
from swarmnode.codec.tensors import FLOAT_DTYPES, ID_DTYPES, Codec, TensorInfo, check_tensor
from swarmnode.codec.training_messages import TRAINING_BODIES, Duration, Values, check_route, check_rules, check_values
from swarmnode.codec.tuning_messages import TUNING_BODIES
from swarmnode.errors import ProtocolError

INFER_PROTOCOL = "/swarmnode/infer/1"


class Infer(Body, frozen=True):
    """Question for a pass through layers [start, end). The payload is the values before layer `start`, one after another."""

    start: Unit
    end: Unit
    values: Values
    within_s: Duration = 0.0  # seconds that the client waits for the answer; 0: without limit
    # Id of the work in the client's receipt; empty: there will be none.
    work: Annotated[bytes, Meta(max_length=SESSION_ID_BYTES)] = b""

    def check(self) -> None:
        check_rules("INFER", {"units": self.start < self.end, "work": len(self.work) in (0, SESSION_ID_BYTES)})
        check_values(self.values)


class Inferred(Body, frozen=True):
    """Answer to INFER: the values before layer `end`, or after the last layer the graph's results. Ends the conversation."""

    values: Values

    def check(self) -> None:
        check_values(self.values)


INFERENCE_BODIES: dict[FrameKind, type[Body]] = {FrameKind.INFER: Infer, FrameKind.INFERRED: Inferred}


MAX_STATE_BLOCKS = 4097
MAX_STATE_BYTES = 1 << 37
MAX_ENTRIES = 1024  # in one frame
MAX_LISTED = 12 * MAX_ENTRIES  # in one answer


class ListStates(Body, frozen=True):
    """Question for the stored steps of these blocks (empty: of all) of the run with this id (empty: of the peer's current run).

    If no step is as late as `at_least`, the peer first stores its current step.
    """

    at_least: Step = 0
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_STATE_BLOCKS)] = ()
    run: Annotated[bytes, Meta(max_length=ROOT_BYTES)] = b""


class StateEntry(Body, frozen=True):
    """State of one block at the beginning of a step: a safetensors file of `size` bytes with this root. `backup`: it is kept for
    another peer."""

    step: Step
    block: Block
    size: Annotated[int, Meta(ge=0, le=MAX_STATE_BYTES)]
    root: Root
    backup: bool = False


class States(Body, frozen=True):
    """Part of the answer to LIST_STATES: the run, and some of its states."""

    run: RunBytes
    entries: Annotated[tuple[StateEntry, ...], Meta(max_length=MAX_ENTRIES)] = ()


class BackUp(Body, frozen=True):
    """Request to keep a state of the sender. The receiver fetches it by GET_CHUNKS, at most at `rate_bps` (0: without limit)."""

    run: RunBytes
    state: StateEntry
    rate_bps: Annotated[float, Meta(ge=0, le=MAX_RATE_BPS)] = 0.0


STATE_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.LIST_STATES: ListStates,
    FrameKind.STATES: States,
    FrameKind.BACK_UP: BackUp,
}


MAX_RECEIPT_BYTES = 512
MAX_WORK_IDS = 256
MAX_CLAIMED = 64

WorkId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
SignedBytes = Annotated[bytes, Meta(min_length=1, max_length=MAX_RECEIPT_BYTES)]


class SignedReceipt(Body, frozen=True):
    """A receipt (`protocol/records.md`), and the work that it covers beyond the one before: sessions and passes by their ids,
    microbatches by the seals of their leases."""

    work: Annotated[tuple[WorkId, ...], Meta(min_length=1, max_length=MAX_WORK_IDS)]
    receipt: SignedBytes


class CreditClaim(Body, frozen=True):
    """Voucher of a node that lends a client the credit of its receipts, with these receipts."""

    voucher: SignedBytes
    receipts: Annotated[tuple[SignedBytes, ...], Meta(min_length=1, max_length=MAX_CLAIMED)]


CREDIT_BODIES: dict[FrameKind, type[Body]] = {FrameKind.RECEIPT: SignedReceipt, FrameKind.CLAIM: CreditClaim}


PROOF_BYTES = 32
BRANCH_DOMAIN = b"swarmnode-branch-1\0"
FAULT_DOMAIN = b"swarmnode-fault-1\0"
_PLACE = struct.Struct("<II")
_FAULT = struct.Struct("<IBHd")


class Branch(Body, frozen=True):
    """Reference to another session with the same first `length` positions. `proof` identifies it to a hop that has it, and reveals
    nothing to others."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
    length: Annotated[int, Meta(ge=1, le=MAX_POSITIONS)]


def branch_proof(source: bytes, truncations: int, session: bytes, length: int) -> bytes:
    """Return the proof that the opener of `session` knows the id of the session `source`: the SHA-256 of both ids and both numbers.

    `truncations` is the number of truncations of the source. The proof is valid for this one session, and for no earlier or later
    text of the source.
    """
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
        """Oldest and newest protocol version that the sender speaks."""
        return self.version, max(self.version, self.newest)


class Ping(Body, frozen=True):
    """Request for a PONG with the same seq, which is sent at once; the sender measures the round trip."""


class Pong(Body, frozen=True):
    """Answer to PING. `received_bps` is the rate of the asker's recent large frames in bits/s; 0 if there were none."""

    received_bps: Annotated[float, Meta(ge=0, le=MAX_RATE_BPS)] = 0.0


class Error(Body, frozen=True):
    """Error of the frame's channel (channel 0: of the whole link). Text is never sent: each code has a fixed text."""

    code: Code
    retry_s: RetrySeconds = 0.0


class End(Body, frozen=True):
    """Orderly end of the channel (channel 0: of the link). A stream that ends without it was cut."""


class Revocations(Body, frozen=True):
    """Number of the owner's revocation list that the sender follows (0: none yet); `signed` is the list itself, for a receiver with
    an older one."""

    number: Annotated[int, Meta(ge=0, le=MAX_SEQ)]
    signed: Annotated[bytes, Meta(max_length=MAX_REVOCATIONS_BYTES)] = b""


class Mode(IntEnum):
    """Party that chooses the next token of a session: the last peer of the route, or the client."""

    RING = 0  # the last hop samples, and feeds the first hop at once
    DRIVEN = 1  # the client drives every step


NO_DRAFTS, LOOKUP, ANY_DRAFTS = DRAFT_SOURCES = "off", "lookup", "auto"
"""A client's choices of guesses, besides the name of a draft model."""


class ProposerKind(IntEnum):
    """Source of a guess. OTHER is a source that this version does not know, or that was not told."""

    OTHER = 0
    LOOKUP = 1
    FORCED = 2
    MODEL = 3
    MTP = 4

    @property
    def label(self) -> str:
        """Name in metrics, in JSON and on the page."""
        return self.name.lower()

    @classmethod
    def named(cls, label: str) -> ProposerKind:
        """Return the proposer with this label; OTHER if the label is unknown."""
        return next((one for one in cls if one.label == label), cls.OTHER)

    @classmethod
    def numbered(cls, number: int) -> ProposerKind:
        """Return the proposer of a number from another peer; OTHER if the number is unknown."""
        return cls(number) if number in cls._value2member_map_ else cls.OTHER


class LinkCodec(Body, frozen=True):
    """Codec of the states that enter layer `unit`, from position `start` of a session on.

    A hop sends it upstream to the client when it has chosen; the client puts it into OPEN, for the peer that sends these positions
    again.
    """

    unit: Unit
    start: Position
    codec: Code

    def check(self) -> None:
        if self.codec not in Codec._value2member_map_:
            raise ProtocolError(f"a LINK_CODEC needs a codec of this version, not {self.codec}")


class AdapterTicket(Body, frozen=True):
    """Right of a session to an adapter that a member brought: the adapter's signed record, and for a private one the signature of
    its owner over this OPEN of the peer `client`, made `at` (unix time in seconds)."""

    record: Annotated[bytes, Meta(min_length=1, max_length=MAX_ADAPTER_RECORD_BYTES)]
    at: Annotated[int, Meta(ge=0, lt=1 << 40)] = 0
    client: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""
    signature: Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)] = b""


class Open(Body, frozen=True):
    """Command that opens a session at a hop, or moves it to a newer epoch. From now on the frame's channel carries its INPUT
    frames.

    It travels from hop to hop along `route`; `index` is the receiver's place in it. `max_length` is the number of positions that
    the hop reserves cache for. `padding` is the number of left-padding positions of each row. The payload is the earlier text, for
    the penalties of `sampling`: ids_T (int32), of the length of its `text_length`.

    States between hops travel as `codec`, except as `codecs` says. If `adapts`, each hop chooses the codec for later positions.
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
    known: Position = 0  # the client has the outputs of positions below this: a replay need not produce them again
    truncate: Truncate | None = None  # applied first: another text begins as the session's does
    codecs: Annotated[tuple[LinkCodec, ...], Meta(max_length=MAX_LINK_CODECS)] = ()
    adapts: bool = False
    adapter: Annotated[str, Meta(max_length=MAX_ADAPTER_CHARS)] = (
        ""  # name in the manifest, or the id of one that a member brought
    )
    branch: Branch | None = None  # another session with the same beginning, for hops that do not know this one
    drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0  # most guesses in flight; 0: the first hop guesses none
    proposer: Annotated[str, Meta(max_length=MAX_PROPOSER_CHARS)] = ""  # source of the guesses: lookup or auto
    ticket: AdapterTicket | None = None  # for an `adapter` that the manifest does not list
    # hops of the former route with its caches
    leaving: Annotated[tuple[HopSpec, ...], Meta(max_length=MAX_LEAVING)] = ()

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
            "guesses in RING mode": self.drafts == 0 or self.mode == Mode.RING,
            "an adapter with a ticket": self.ticket is None or bool(self.adapter),
        }
        check_rules("OPEN", rules)
        if self.sampling is not None:
            self.sampling.check()


class Ready(Body, frozen=True):
    """Answer to OPEN on the same channel: the hop holds positions [0, have) of the session."""

    have: Position


class Attach(Body, frozen=True):
    """Subscription of the frame's channel to the outputs of a session at its last hop, from position `start` on."""

    session: SessionId
    epoch: Epoch
    start: Position = 0


class Want(IntEnum):
    """Outputs that the last hop shall produce for an INPUT."""

    NOTHING = 0
    LAST = 1  # of the last position
    ALL = 2


_INPUT_DTYPES = {2: ID_DTYPES, 3: FLOAT_DTYPES}  # by rank


class Input(Body, frozen=True):
    """Positions [seq, seq + T) of a session. The payload is ids_BT (int64 or int32) if the route begins with layer 0, else
    hidden_BTH.

    `reorder`, if not empty, is applied before the input: for each row of the cache, the row that it continues (beam search).

    The last `guessed` of all positions up to the end of this input hold guessed tokens. An input of a higher `turn` than the ones
    before takes back the guesses from its first position on.
    """

    tensor: TensorInfo
    want: Code = 0
    reorder: Annotated[tuple[Row, ...], Meta(max_length=MAX_ROWS)] = ()
    guessed: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    turn: Turn = 0

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
    """Command before an INPUT: forget the positions from `to` on (rejected drafts, for example).

    `number` counts the truncations of a session, so that one that is repeated after a fault changes nothing.
    """

    number: Annotated[int, Meta(ge=1, le=MAX_SEQ)]
    to: Position


class Drafts(Body, frozen=True):
    """Guessed tokens at the positions from `seq` on, from the first hop of a ring to the last one, before their INPUT of the same
    `turn`. Middle hops do not get them. `proposers` names the source of each id (see ProposerKind); empty if unknown."""

    ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_DRAFTS)]
    turn: Turn = 0
    proposers: Annotated[tuple[Code, ...], Meta(max_length=MAX_DRAFTS)] = ()

    def check(self) -> None:
        check_rules("DRAFTS", {"a proposer of no id or of each": len(self.proposers) in (0, len(self.ids))})


class KeepCache(Body, frozen=True):
    """Note that no further input follows for now. The session's cache stays while there is room, for a text with the same
    beginning."""


class Output(Body, frozen=True):
    """Output of the last hop for the position before `seq`.

    RING: `ids` are the tokens at position `seq`, one per row. If `logprobs` are wanted the payload has them (`codec/sampling.py`).

    DRIVEN: the payload is described by `tensor` (logits_BTV or hidden_BTH), whose last position is seq - 1. `final` says that no
    output follows (a stop token, or max_new_tokens reached).

    `guessed` says that the input before it was a guess, which was right, by `proposer`. `wasted` counts the wrong guesses since the
    output before, and `wasted_by` by the numbers of their proposers; empty if unknown.
    """

    ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ROWS)] = ()
    final: bool = False
    tensor: TensorInfo | None = None
    guessed: bool = False
    wasted: Position = 0
    forced: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_DRAFTS)] = ()  # tokens that must follow, by the grammar
    proposer: Code = 0
    wasted_by: Annotated[tuple[Position, ...], Meta(max_length=MAX_PROPOSERS)] = ()
    guesses: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_DRAFTS)] = ()  # that may follow, by a prediction layer

    def check(self) -> None:
        if bool(self.ids) == (self.tensor is not None):
            raise ProtocolError("an OUTPUT needs either ids or a tensor")
        if self.wasted_by and sum(self.wasted_by) != self.wasted:
            raise ProtocolError("an OUTPUT needs wasted guesses by proposer that add up to all of them")
        if self.tensor is not None:
            check_tensor(self.tensor)
            if len(self.tensor.shape) != 3 or self.tensor.dtype not in FLOAT_DTYPES:
                raise ProtocolError(f"an OUTPUT needs floats [rows, positions, width], not {self.tensor}")


class Fault(Body, frozen=True):
    """Report to the client, passed upstream: hop `index` of the route of `epoch` cannot go on, for the reason `code`.

    In a session `signature` is that of the hop that reports it, over `statement`; empty if the hop does not sign.
    """

    epoch: Epoch
    index: HopIndex
    code: Code
    retry_s: RetrySeconds = 0.0
    signature: Annotated[bytes, Meta(max_length=MAX_SIGNATURE_BYTES)] = b""

    def statement(self, session: bytes) -> bytes:
        """Return the bytes that the reporting hop signs, for this one session and epoch."""
        return FAULT_DOMAIN + session + _FAULT.pack(self.epoch, self.index, self.code, self.retry_s)


class GetManifest(Body, frozen=True):
    """Question for the manifest of the swarm named in HELLO."""


class ManifestReply(Body, frozen=True):
    """Answer to GET_MANIFEST. The payload is the manifest; its SHA-256 is the swarm id."""


class GetChunks(Body, frozen=True):
    """Question for `count` chunks of the file with this root, from number `first` on; if `count` is 0, for its chunk hashes."""

    root: Root
    first: Annotated[int, Meta(ge=0, le=MAX_SEQ)]
    count: Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]


class OfferAdapter(Body, frozen=True):
    """Offer of the files of an adapter, by its signed record, to a hop of a session to come. While the conversation lasts, the
    receiver asks for chunks on it with GET_CHUNKS, one question at a time."""

    record: Annotated[bytes, Meta(min_length=1, max_length=MAX_ADAPTER_RECORD_BYTES)]


class Chunk(Body, frozen=True):
    """Chunk number `seq` of a file; if `hashes`, the file's whole list of chunk hashes, 32 bytes each."""

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
    FrameKind.DRAFTS: Drafts,
    FrameKind.OFFER_ADAPTER: OfferAdapter,
    **MEASURING_BODIES,
    **TRACE_BODIES,
    **AUDIT_BODIES,
    **HANDOVER_BODIES,
    **CREDIT_BODIES,
    **TRAINING_BODIES,
    **SPOT_CHECK_BODIES,
    **STATE_BODIES,
    **INFERENCE_BODIES,
    **TUNING_BODIES,
}
KIND_OF: dict[type[Body], FrameKind] = {body: kind for kind, body in BODIES.items()}

_encoder = msgspec.msgpack.Encoder()
_decoders = {int(kind): msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()}
_EMPTY: dict[int, Body] = {
    int(KIND_OF[body]): body() for body in (Ping, Pong, End, KeepCache, GetManifest, ManifestReply)
}


def encode_body(body: Body) -> bytes:
    """Return the msgpack bytes of a body; no bytes for an END, PING, KEEP or other body that may be empty and has only defaults."""
    return b"" if body == _EMPTY.get(KIND_OF[type(body)]) else _encoder.encode(body)


def decode_body(kind: int, data: bytes | bytearray | memoryview) -> Body:
    """Return the body of a frame. Raises ProtocolError: TOO_LARGE for a tensor over its bound, else MALFORMED, also for an unknown
    kind."""
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
