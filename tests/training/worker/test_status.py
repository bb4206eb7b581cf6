"""Masks in a STATUS."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import decode_body, encode_body
from swarmnode.codec.training_messages import Counted, Status
from swarmnode.errors import ProtocolError
from swarmnode.training.worker.stage_state import counted_of, masks_of

EVERYTHING = (1 << 20) - 1
masks = st.dictionaries(st.integers(0, 30), st.one_of(st.just(5), st.integers(0, EVERYTHING)))


@given(held=masks)
def test_masks_come_back(held: dict[int, int]) -> None:
    assert masks_of(counted_of(held), EVERYTHING) == {unit: mask for unit, mask in held.items() if mask}


@given(held=masks)
def test_they_are_a_status_that_others_accept(held: dict[int, int]) -> None:
    status = Status(1, 1, 0, 31, counted=counted_of(held))
    assert decode_body(FrameKind.STATUS, encode_body(status)) == status


def test_units_of_one_mask_are_one_entry() -> None:
    assert counted_of({3: 5, 4: 5, 5: 5, 7: 5, 8: 256}) == (
        Counted(3, 6, b"\x05"),
        Counted(7, 8, b"\x05"),
        Counted(8, 9, b"\x00\x01"),
    )


def test_a_microbatch_that_the_step_does_not_have() -> None:
    with pytest.raises(ProtocolError, match="does not have"):
        masks_of([Counted(0, 1, b"\x10")], 0b1111)
