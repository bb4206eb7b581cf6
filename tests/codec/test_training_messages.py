"""The largest bodies that the limits of training allow fit a frame."""

from __future__ import annotations

from swarmnode.codec.body import MAX_RUN_BYTES, MAX_STEP, MAX_UNITS
from swarmnode.codec.frames import MAX_BODY_BYTES, FrameKind
from swarmnode.codec.messages import decode_body, encode_body
from swarmnode.codec.training_messages import (
    MAX_KEPT_STEPS,
    MAX_LEASE,
    MAX_LEASES,
    MAX_MASK_BYTES,
    MAX_RANGES,
    MAX_TERM,
    Counted,
    Group,
    MemberSpec,
    Reduce,
    Release,
    Status,
)


def test_the_largest_status_fits() -> None:
    first = MAX_UNITS - MAX_RANGES
    status = Status(
        MAX_TERM,
        1,
        first,
        MAX_UNITS,
        bytes(MAX_RUN_BYTES),
        MAX_STEP,
        tuple(Counted(unit, unit + 1, b"\xff" * MAX_MASK_BYTES) for unit in range(first, MAX_UNITS)),
        (MAX_STEP,) * MAX_KEPT_STEPS,
        losses=(2.5,) * (8 * MAX_MASK_BYTES),
    )
    data = encode_body(status)
    assert len(data) <= MAX_BODY_BYTES
    assert decode_body(FrameKind.STATUS, data) == status


def test_the_longest_release_fits() -> None:
    assert len(encode_body(Release((MAX_LEASE,) * MAX_LEASES, bytes(32)))) <= MAX_BODY_BYTES


def test_a_group_of_the_deepest_model_and_most_replicas_fits() -> None:
    members = tuple(MemberSpec(f"{number:052}", 1) for number in range(64))
    body = Reduce(MAX_STEP, 1, (Group(0, tuple(range(-1, MAX_UNITS)), members),), bytes(32))
    assert len(encode_body(body)) <= MAX_BODY_BYTES
