"""Places for others' training states: nobody has one for ever, and nobody several while others wait."""

from __future__ import annotations

import pytest

from swarmnode.checkpoints.state_backups import AT_ONCE, MAX_WAITING, TURN_S, WAITS_S, BackupPlaces, BackupTurn
from swarmnode.errors import Busy
from swarmnode.net.addressing.addresses import Claimant


class Scene:
    """Places, and a clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.places = BackupPlaces(lambda: self.now_s)
        self.over: list[str] = []

    def take(self, peer: str, group: str = "") -> BackupTurn | None:
        """None: it is busy."""
        try:
            turn = self.places.admit(Claimant(group or peer, peer))
        except Busy:
            return None
        turn.give_way = lambda: self.over.append(peer)
        return turn


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_four_at_once_and_a_place_that_is_left_is_free(scene: Scene) -> None:
    turns = [scene.take(f"writer {number}") for number in range(AT_ONCE)]
    assert None not in turns and scene.take("another") is None
    assert turns[0] is not None
    scene.places.leave(turns[0])
    assert scene.take("another") is not None and scene.over == []


def test_a_turn_is_over_when_others_wait_and_not_before(scene: Scene) -> None:
    for number in range(AT_ONCE):
        scene.take(f"slow {number}")
        scene.now_s += 1
    scene.now_s += 10 * TURN_S
    assert scene.over == []  # nobody waited
    assert scene.take("honest") is not None and scene.over == ["slow 0"]


def test_a_turn_that_gave_way_may_be_left_again(scene: Scene) -> None:
    turns = [scene.take(f"slow {number}") for number in range(AT_ONCE)]
    scene.now_s += TURN_S
    scene.take("honest")
    assert turns[0] is not None and turns[0].over
    scene.places.leave(turns[0])
    assert scene.take("another") is not None and scene.take("a third") is not None


def test_who_waited_longest_is_next_however_often_others_ask(scene: Scene) -> None:
    for number in range(AT_ONCE):
        scene.take(f"slow {number}")
    assert scene.take("honest") is None
    for second in range(int(TURN_S)):
        scene.now_s += 1
        took = scene.take("impatient")
        assert (took is not None) == (second == TURN_S - 1)  # the second place that is due
    scene.now_s += 1
    assert scene.take("honest") is not None


def test_who_gave_way_waits_as_long_as_everybody(scene: Scene) -> None:
    """Four that ask again at once have no more of the places than one who waits."""
    slow = [f"slow {number}" for number in range(AT_ONCE)]
    had = dict.fromkeys([*slow, "honest"], 0)
    holding: list[str] = []
    for _ in range(50):
        for peer in (*slow, "honest"):
            if peer not in holding and scene.take(peer) is not None:
                holding.append(peer)
                had[peer] += 1
            for peer_over in scene.over:
                holding.remove(peer_over)
            scene.over.clear()
        scene.now_s += TURN_S
    assert min(had.values()) >= max(had.values()) - 2 > 0


def test_ten_ids_of_one_network_have_one_turn(scene: Scene) -> None:
    for number in range(AT_ONCE):
        assert scene.take(f"sybil {number}", "203.0.113.0/24") is not None
    assert scene.take("honest") is not None and scene.over == ["sybil 1"]
    assert scene.take("sybil 9", "203.0.113.0/24") is None
    scene.now_s += 100 * TURN_S
    assert scene.take("sybil 9", "203.0.113.0/24") is None


def test_addresses_of_a_private_network_are_nobody_s_group(scene: Scene) -> None:
    for number in range(AT_ONCE):
        scene.take(f"neighbour {number}", "192.168.1.7")
    assert scene.take("another", "192.168.1.7") is None


def test_who_does_not_come_back_is_not_waited_for(scene: Scene) -> None:
    for number in range(AT_ONCE):
        scene.take(f"slow {number}")
    for number in range(2 * MAX_WAITING):
        assert scene.take(f"ghost {number}") is None
    scene.now_s += WAITS_S
    assert scene.take("honest") is not None
