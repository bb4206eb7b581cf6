"""Calls on doors that were started anew."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from swarmnode.peer.host import CALLERS, FIRST_S, MAX_PAUSE_S, dial_bootstraps, pause_s, unconnected

ONE, TWO = "/ip4/8.8.8.8/tcp/4001/p2p/12D3KooWone", "/ip4/8.8.4.4/tcp/4001/p2p/12D3KooWtwo"


class Town:
    """Two doors; `up` are those that answer. Ends after `rounds` pauses, which it keeps."""

    def __init__(self, rounds: int, up: Sequence[str]) -> None:
        self.up = up
        self.connected: set[str] = set()
        self.called: list[list[str]] = []
        self.pauses_s: list[float] = []
        self._rounds = rounds

    async def sleep(self, delay_s: float) -> None:
        if len(self.pauses_s) == self._rounds:
            raise asyncio.CancelledError
        self.pauses_s.append(delay_s)

    async def known(self) -> set[str]:
        return self.connected

    async def call(self, bootstraps: Sequence[str]) -> bool:
        self.called.append(list(bootstraps))
        answering = {door.rpartition("/")[2] for door in bootstraps if door in self.up}
        self.connected |= answering
        return bool(answering)

    async def run(self) -> None:
        with pytest.raises(asyncio.CancelledError):
            await dial_bootstraps([ONE, TWO], self.known, self.call, lambda: 5.0, sleep=self.sleep)


async def test_doors_without_a_connection_are_called_and_left_alone_once_they_answer() -> None:
    town = Town(3, up=[ONE, TWO])
    town.connected.add("12D3KooWone")
    await town.run()
    assert town.called == [[TWO]] and town.pauses_s == [FIRST_S, FIRST_S, 2 * FIRST_S]


async def test_where_all_doors_are_connected_it_looks_seldom_and_comes_back_to_its_pace() -> None:
    town = Town(6, up=[ONE, TWO])
    town.connected |= {"12D3KooWone", "12D3KooWtwo"}
    await town.run()
    assert town.called == [] and town.pauses_s == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]


async def test_ever_more_slowly_while_nobody_answers() -> None:
    town = Town(8, up=[])
    await town.run()
    assert town.called == [[ONE, TWO]] * 8
    assert town.pauses_s == [2.0, 4.0, 8.0, *[MAX_PAUSE_S] * 5]


def test_a_crowd_calls_no_more_often_than_a_few() -> None:
    assert pause_s(20, 1) == pause_s(20, CALLERS) == MAX_PAUSE_S
    assert 10_000 / pause_s(20, 10_000) == pytest.approx(CALLERS / MAX_PAUSE_S)
    assert pause_s(10_000, 1) == MAX_PAUSE_S, "no overflow"


def test_the_same_door_at_two_addresses_is_one() -> None:
    assert unconnected([ONE, "/ip4/10.0.0.1/tcp/4001/p2p/12D3KooWone", TWO], {"12D3KooWone"}) == [TWO]
