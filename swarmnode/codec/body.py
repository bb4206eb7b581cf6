"""Base class of frames' bodies, the types of their fields, and the bounds that msgspec checks while decoding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from swarmnode.codec.frames import MAX_SEQ

VERSION = 1
SWARM_ID_BYTES = 32
SESSION_ID_BYTES = 16
ROOT_BYTES = 32
MAX_SOFTWARE_CHARS = 64
MAX_ADAPTER_CHARS = 64
MAX_ADAPTER_RECORD_BYTES = 512
MAX_SIGNATURE_BYTES = 64
MAX_PROOF_BYTES = 1024
MAX_REVOCATIONS_BYTES = 4096
MAX_PEER_CHARS = 128
MAX_UNITS = 4096
MAX_ROUTE_HOPS = 256
MAX_ROWS = 256
MAX_POSITIONS = 1 << 24
MAX_WANTED_POSITIONS = 1024  # positions of one input that wants the outputs of all of them
MAX_STOP_IDS = 64
MAX_TOKEN_ID = (1 << 31) - 1
MAX_TEMPERATURE = 1e6
MAX_RETRY_S = 3600.0
MAX_SEED = (1 << 63) - 1
MAX_CHUNKS = 1 << 16
MAX_LINK_CODECS = 1024
MAX_DRAFTS = 32  # guessed positions of one session in flight; below what sliding windows can go back
MAX_PROPOSER_CHARS = 64
MAX_PROPOSERS = 16  # numbers of proposers of guesses; later versions may know more of them
EPOCH_TURNS = 1 << 24  # turns of one epoch: the first hop guesses wrong at most once at each position
MAX_CODE = 0xFFFF
MAX_RATE_BPS = 1e15
MAX_RUN_BYTES = 4096
MAX_STEP = 1 << 40

SHARED = -1
"""Number of the block of parameters that the first and the last unit share (tied embedding and head)."""

DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Block = Annotated[int, Meta(ge=SHARED, le=MAX_UNITS)]
Code = Annotated[int, Meta(ge=0, le=MAX_CODE)]
Epoch = Annotated[int, Meta(ge=0, le=MAX_SEQ)]
HopIndex = Annotated[int, Meta(ge=0, lt=MAX_ROUTE_HOPS)]
Position = Annotated[int, Meta(ge=0, le=MAX_POSITIONS)]
RetrySeconds = Annotated[float, Meta(ge=0, le=MAX_RETRY_S)]
Root = Annotated[bytes, Meta(min_length=ROOT_BYTES, max_length=ROOT_BYTES)]
Row = Annotated[int, Meta(ge=0, lt=MAX_ROWS)]
RunBytes = Annotated[bytes, Meta(max_length=MAX_RUN_BYTES)]
SessionId = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
Step = Annotated[int, Meta(ge=0, le=MAX_STEP)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
Turn = Annotated[int, Meta(ge=0, lt=(MAX_SEQ + 1) * EPOCH_TURNS)]
Unit = Annotated[int, Meta(ge=0, le=MAX_UNITS)]


class Body(msgspec.Struct, array_like=True, frozen=True):
    """Base class of the bodies of all kinds of frames (messages between peers)."""

    def check(self) -> None:
        """Raise ProtocolError if the fields, each valid alone, contradict one another."""


class HopSpec(Body, frozen=True):
    """Hop of a route: the peer and the layers [start, end) that it computes."""

    peer: Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
    start: Unit
    end: Unit


def first_broken(rules: Mapping[str, bool]) -> str | None:
    """Return the first rule that is not kept; None if all are."""
    return next((rule for rule, kept in rules.items() if not kept), None)
