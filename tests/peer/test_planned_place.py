"""How long a node stays where a plan puts it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swarmnode.peer.placement import COMING_S, PlannedPlace
from swarmnode.plan.offline.planner_files import PlanFile
from swarmnode.plan.view import Span
from swarmnode.swarm.records.announcement import State

ME, MATE, OTHER, UNUSED = "me", "mate", "other", "unused"
PLAN = PlanFile(6, ((Span(0, 3), (0, 1)), (Span(3, 6), (2,))), ((0, 2),), (ME, MATE, OTHER, UNUSED))


class World:
    """Peers as a node's directory has them, and its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.known = dict[str, SimpleNamespace]()

    def has(self, peer: str, span: tuple[int, int], state: State = State.READY) -> None:
        self.known[peer] = SimpleNamespace(span=span, life=state)

    def place(self, peer: str = ME) -> PlannedPlace:
        host = SimpleNamespace(
            peer_id=peer,
            swarm=SimpleNamespace(manifest=SimpleNamespace(model=SimpleNamespace(units=6))),
            directory=SimpleNamespace(peers=lambda: self.known),
            clock=SimpleNamespace(monotonic=lambda: self.now_s),
        )
        return PlannedPlace(PLAN, host)  # type: ignore[arg-type]


@pytest.fixture
def world() -> World:
    world = World()
    world.has(ME, (0, 3))
    return world


def test_it_stays_while_others_come_one_by_one(world: World) -> None:
    place = world.place()
    assert place.span == (0, 3) and place.holds()
    world.has(MATE, (0, 3), State.LOADING)
    assert place.holds()
    world.has(OTHER, (3, 6))
    world.now_s = 10 * COMING_S
    assert place.holds()


def test_strangers_and_who_is_not_used_change_nothing(world: World) -> None:
    place = world.place()
    world.has("stranger", (2, 5))
    world.has(UNUSED, (0, 6))
    assert place.holds()


def test_who_never_comes_is_not_waited_for(world: World) -> None:
    place = world.place()
    world.has(MATE, (0, 3))
    world.now_s = COMING_S - 1
    assert place.holds()
    world.now_s = COMING_S
    assert not place.holds()


@pytest.mark.parametrize("state", [State.JOINING, State.DRAINING, State.PAUSED, State.OFFLINE, None])
def test_once_one_has_gone_it_goes_on_as_all_do_until_that_one_is_back(world: World, state: State | None) -> None:
    place = world.place()
    world.has(OTHER, (3, 6))
    assert place.holds()
    if state is None:
        del world.known[OTHER]
    else:
        world.has(OTHER, (3, 6), state)
    assert not place.holds()
    world.has(OTHER, (3, 6), State.LOADING)
    assert place.holds()


def test_once_one_is_elsewhere_the_plan_is_not_carried_out(world: World) -> None:
    place = world.place()
    world.has(OTHER, (0, 3))
    assert not place.holds()


def test_who_has_left_its_own_place_is_not_led_back(world: World) -> None:
    place = world.place()
    world.has(ME, (3, 6))
    assert not place.holds()


def test_a_peer_that_the_plan_does_without_is_free(world: World) -> None:
    assert not world.place(UNUSED).holds()
    assert not world.place("stranger").holds()
