"""What spans and peers say of themselves."""

from __future__ import annotations

import pytest

from swarmnode.plan.view import PeerView, Span


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (Span(0, 4), Span(3, 6), True),
        (Span(0, 4), Span(4, 6), False),
        (Span(0, 6), Span(2, 3), True),
        (Span(0, 6), Span(3, 3), False),
    ],
)
def test_spans_overlap_where_they_share_a_unit(one: Span, other: Span, expected: bool) -> None:
    assert one.overlaps(other) is other.overlaps(one) is expected
    assert bool(set(range(*one)) & set(range(*other))) is expected


def test_a_peer_that_nobody_measured_is_not_taken_to_stand_still() -> None:
    assert PeerView("measured", Span(0, 2), decode_units_per_s=7.5).assumed_units_per_s == 7.5
    assert PeerView("unmeasured", Span(0, 2)).assumed_units_per_s > 0
