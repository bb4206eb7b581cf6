"""Who goes on from the factors of the last sum, and who begins anew: nobody goes on alone."""

from __future__ import annotations

from typing import Any, cast

import pytest

from swarmnode.codec.training_messages import Group, How, MemberSpec, Sync
from swarmnode.links.switchboard import Channel
from swarmnode.training.coordinator.averaging_groups import WarmStarts
from swarmnode.training.coordinator.worker_group import WorkerHandle, WorkerState


class Line:
    """One that takes everything."""

    open = True
    rtt_s = None

    def send(self, _body: Any) -> None:
        """Nobody hears it."""


def handle(name: str) -> WorkerHandle:
    return WorkerHandle(name, cast("Channel", Line()), lambda: 0.0, WorkerState.USABLE)


def group(names: str, blocks: tuple[int, ...] = (0, 1), how: int = How.SUM) -> Group:
    return Group(0, blocks, tuple(MemberSpec(name, 1) for name in names), how)


@pytest.fixture
def members() -> list[WorkerHandle]:
    return [handle(name) for name in "abc"]


@pytest.fixture
def warm(members: list[WorkerHandle]) -> WarmStarts:
    starts = WarmStarts()
    assert not starts.may(group("abc"), members), "nothing was summed yet"
    starts.committed([group("abc")], members)
    assert starts.may(group("abc"), members)
    return starts


def test_those_that_are_left_go_on(warm: WarmStarts, members: list[WorkerHandle]) -> None:
    assert warm.may(group("ab"), members[:2])


def test_who_comes_or_comes_back_makes_all_begin_anew(warm: WarmStarts, members: list[WorkerHandle]) -> None:
    assert not warm.may(group("abcd"), [*members, handle("d")])
    assert not warm.may(group("abc"), [*members[:2], handle("c")]), "by another line"
    assert not warm.may(group("abc"), members[:2]), "c is gone"


def test_who_moves_to_another_step_has_lost_it(warm: WarmStarts, members: list[WorkerHandle]) -> None:
    members[1].command(Sync(b"", 3, ("a",)))
    assert not warm.may(group("abc"), members)
    members[1].state = WorkerState.USABLE
    assert not warm.may(group("abc"), members), "it is here again, with another learner"
    warm.committed([group("abc")], members)
    assert warm.may(group("abc"), members)


def test_who_only_listens_goes_on_from_nothing(members: list[WorkerHandle]) -> None:
    starts = WarmStarts()
    members[2].state = WorkerState.LISTENING
    starts.committed([group("abc")], members)
    members[2].state = WorkerState.USABLE
    assert not starts.may(group("abc"), members)
    assert starts.may(group("ab"), members)


def test_other_blocks_and_other_sums_are_others(warm: WarmStarts, members: list[WorkerHandle]) -> None:
    assert not warm.may(group("abc", (0,)), members)
    assert not warm.may(group("abc", how=How.AVERAGE), members)
    warm.committed([group("abc", how=How.AVERAGE)], members)
    assert warm.may(group("abc"), members) and warm.may(group("abc", how=How.AVERAGE), members)
    warm.committed([group("abc", (1, 2))], members)
    assert not warm.may(group("abc"), members), "unit 1 went on without it"
    warm.clear()
    assert not warm.may(group("abc", (1, 2)), members)
