"""A hundred announcers on one machine, over real DHT peers: all of them find one another, and notice who moves and who goes.

A dozen announcers share a p2pd, as 100 of them want more memory than a small machine has; each has its own identity and
directory, and every read and store goes over libp2p.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import Dht
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import State, record_validator
from swarmnode.swarm.records.sections import Introduction, Place

SWARM = bytes(range(32))
ANNOUNCERS = 100
ENGINES = 8
UNITS = 24
CONVERGED_S = 60.0

check_once = functools.lru_cache(maxsize=100_000)(verify)  # 100 readers of each record in one process, on two cores


@dataclass
class Seat:
    """An announcer's place on a network that it shares."""

    dht: Dht
    peer_id: str


@pytest_asyncio.fixture
async def engines(tmp_path: Path) -> AsyncIterator[list[Engine]]:
    started: list[Engine] = []
    for number in range(ENGINES):
        path = tmp_path / f"{number}.key"
        Identity.load_or_create(path)
        config = EngineConfig(path, record_validator=record_validator(SWARM, check_once, time.time))
        started.append(await Engine.start(config))
        if number:
            assert await started[-1].connect(await started[0].addresses(), timeout_s=10)
    yield started
    for engine in started:
        await engine.close()


async def until(holds: Callable[[], bool], what: str) -> float:
    """Seconds until it holds."""
    began_s = time.monotonic()
    while not holds():
        assert time.monotonic() - began_s < CONVERGED_S, what
        await asyncio.sleep(0.2)
    return time.monotonic() - began_s


@pytest.mark.timeout(240)
async def test_a_hundred_announcers_converge(engines: list[Engine]) -> None:
    directories: list[Directory] = []
    for number in range(ANNOUNCERS):
        identity = Identity.generate()
        seat = Seat(engines[number % ENGINES].dht, identity.peer_id)
        directory = Directory(seat, SWARM, verify=check_once, sign=identity.sign)  # type: ignore[arg-type]
        start = 8 * (number % 3)
        directory.announce(Place(state=State.READY, span=(start, start + 8)), Introduction(name=f"announcer {number}"))
        directories.append(directory)
    everybody = {directory.network.peer_id for directory in directories}

    def all_see(peer: str, span: tuple[int, int]) -> bool:
        seen = [one.peers().get(peer) for one in directories[2:]]
        return all(announcement is not None and announcement.span == span for announcement in seen)

    try:
        await asyncio.gather(*(directory.start() for directory in directories))
        took_s = await until(
            lambda: all(set(directory.peers()) == everybody for directory in directories), "all see all"
        )
        mover, leaver, *others = directories
        mover.announce(Place(span=(16, 24)))
        moved_s = await until(lambda: all_see(mover.network.peer_id, (16, 24)), "all see the move")
        await leaver.close()
        left_s = await until(
            lambda: all(leaver.network.peer_id not in one.peers() for one in others), "all see who left"
        )
        print(
            f"{ANNOUNCERS} announcers: converged in {took_s:.1f} s, a move in {moved_s:.1f} s, a leave in {left_s:.1f} s"
        )
    finally:
        await asyncio.gather(*(directory.close() for directory in directories))
