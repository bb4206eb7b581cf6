"""Fields of the bodies of training: their types, their bounds, and rules between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_PEER_CHARS, MAX_ROUTE_HOPS, MAX_RUN_BYTES, MAX_UNITS, HopSpec, first_broken
from swarmnode.codec.tensors import TensorInfo, check_tensor, element_count
from swarmnode.errors import ErrorCode, ProtocolError

MAX_VALUES = 256  # tensors that cross one boundary
MAX_VALUE_ELEMENTS = 1 << 28  # in all these tensors: a few bytes of top-k can announce very many
MAX_MASK_BYTES = 256  # 2048 microbatches in a step: their losses and MAX_RANGES masks fit one body
MAX_RANGES = 96
MAX_MEMBERS = 64  # replicas that average together
MAX_CLUSTERS = 8  # of these members
MAX_RATES = 64  # of members' paths, in one report
MAX_PARTS = 1 << 20  # of a group's vector
MAX_PULLED = 64  # parts of each kind that may be on the way on one conversation
MAX_GROUPS = 64
MAX_KEPT_STEPS = 16
MAX_LEASES = 4096
MAX_FED = 256
MAX_BLOCKS = MAX_UNITS + 1
MAX_ATTEMPT = 1 << 31
MAX_ROUND = 64
MAX_TERM = 1 << 40
MAX_LEASE = 1 << 62
MAX_NORM = 1e100  # past any norm of float32 numbers, yet finite
MAX_DURATION_S = 1e9
MAX_LEFT_OUT = 16  # the newest ones are reported
MAX_WAITS = 16  # the longest ones are reported
RUN_ID_BYTES = 32
KEY_BYTES = 32
SEAL_BYTES = 16
LARGEST_LOSS = 2.0**128 * (1 - 2.0**-24)  # float32's: stages compute losses in it, and others only their means

Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]  # seconds
Index = Annotated[int, Meta(ge=0, lt=8 * MAX_MASK_BYTES)]
LeaseNumber = Annotated[int, Meta(ge=0, le=MAX_LEASE)]
Load = Annotated[float, Meta(ge=0, le=1 << 14)]  # of the busiest expert over the mean load; 0: unknown
Norm = Annotated[float, Meta(ge=0, le=MAX_NORM)]
Peer = Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
Term = Annotated[int, Meta(ge=0, le=MAX_TERM)]
Number = Annotated[float, Meta(description="losses and squares: NaN and infinity tell something")]
Route = Annotated[tuple[HopSpec, ...], Meta(min_length=1, max_length=MAX_ROUTE_HOPS)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
RunId = Annotated[bytes, Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]  # SHA-256 of the encoded run
AnyRunId = Annotated[bytes, Meta(max_length=RUN_ID_BYTES)]  # empty: none has begun
EncodedRun = Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]
Seal = Annotated[bytes, Meta(max_length=SEAL_BYTES)]
Values = Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_VALUES)]


def packed_mask(mask: int) -> bytes:
    """Return the bits of a mask of microbatches as bytes (little-endian), without zeros at its end."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def check_values(values: tuple[TensorInfo, ...]) -> None:
    """Raise ProtocolError if a descriptor is not valid, or the tensors are too large together."""
    elements = 0
    for info in values:
        check_tensor(info)
        elements += element_count(info.shape)
    if elements > MAX_VALUE_ELEMENTS:
        raise ProtocolError(
            f"values have {elements} elements; the bound is {MAX_VALUE_ELEMENTS}", code=ErrorCode.TOO_LARGE
        )


def check_rules(frame: str, rules: Mapping[str, bool]) -> None:
    """Raise ProtocolError for the first rule that is not kept; `frame` names the frame in its text."""
    if (broken := first_broken(rules)) is not None:
        raise ProtocolError(f"{'an' if frame[0] in 'AEIO' else 'a'} {frame} needs {broken}")


def check_route(frame: str, route: tuple[HopSpec, ...], hop: int = 0) -> None:
    """Raise ProtocolError if the spans of `route` are empty or do not follow one another, or `hop` is not a place in it."""
    rules = {
        "a place inside the route": hop < len(route),
        "spans that are not empty": all(hop.start < hop.end for hop in route),
        "spans that follow one another": all(left.end == right.start for left, right in pairwise(route)),
    }
    check_rules(frame, rules)


def are_different(items: Sequence[object]) -> bool:
    """Return whether no item occurs twice."""
    return len(set(items)) == len(items)
