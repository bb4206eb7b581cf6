"""A run's first step waits until those who had better stand elsewhere have come, and for nobody for ever."""

from __future__ import annotations

import pytest

from swarmnode.plan.training.rule import FirstPlaces
from swarmnode.plan.view import PeerView, Span
from swarmnode.swarm.records.announcement import State

HERE, THERE = Span(0, 2), Span(2, 4)
PATIENCE_S = 10.0


class Looks:
    """Of one node, on a clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.first_places = FirstPlaces(lambda: self.now_s)

    def look(self, *peers: tuple[Span, State], elsewhere: bool) -> bool:
        seen = [PeerView(f"peer {number}", span, state, 1.0) for number, (span, state) in enumerate(peers)]
        self.first_places.record(seen, elsewhere=elsewhere, patience_s=PATIENCE_S)
        return self.first_places.awaited


@pytest.fixture
def looks() -> Looks:
    return Looks()


def test_where_all_are_at_their_places_nobody_is_awaited(looks: Looks) -> None:
    assert not looks.look((HERE, State.READY), (THERE, State.READY), elsewhere=False)


def test_a_newcomer_that_loads_is_not_awaited(looks: Looks) -> None:
    assert not looks.look((HERE, State.READY), (HERE, State.LOADING), elsewhere=False)


def test_who_had_better_be_elsewhere_is_awaited_and_so_is_who_is_on_its_way(looks: Looks) -> None:
    assert looks.look((HERE, State.READY), (HERE, State.READY), elsewhere=True)
    assert looks.look((HERE, State.READY), (HERE, State.DRAINING), elsewhere=True)
    assert looks.look((HERE, State.READY), (THERE, State.LOADING), elsewhere=False)
    assert not looks.look((HERE, State.READY), (THERE, State.READY), elsewhere=False)


def test_who_goes_to_no_units_at_all_is_not_awaited(looks: Looks) -> None:
    assert looks.look((HERE, State.READY), (THERE, State.READY), elsewhere=True)
    assert not looks.look((HERE, State.READY), (Span(0, 0), State.JOINING), elsewhere=False)


def test_patience_begins_when_somebody_is_first_awaited(looks: Looks) -> None:
    """By then all may have stood where they are for long."""
    assert not looks.look((HERE, State.READY), (HERE, State.READY), elsewhere=False)
    looks.now_s = 10 * PATIENCE_S
    assert looks.look((HERE, State.READY), (HERE, State.READY), elsewhere=True)


def test_where_nobody_goes_for_long_nobody_is_awaited_any_more(looks: Looks) -> None:
    """Others may see it in another way, or have been told where to stand."""
    both = (HERE, State.READY), (HERE, State.READY)
    assert looks.look(*both, elsewhere=True)
    looks.now_s = PATIENCE_S - 1
    assert looks.look(*both, elsewhere=True)
    looks.now_s = PATIENCE_S
    assert not looks.look(*both, elsewhere=True)
    assert looks.look((HERE, State.READY), (THERE, State.LOADING), elsewhere=True), "somebody goes"
