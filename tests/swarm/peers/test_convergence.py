"""A hundred announcers on one network: all of them find one another, and notice who moves and who goes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from swarmnode.net.identity import verify
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.records.announcement import Introduction, Place, State
from tests.net.virtual import in_virtual_time

SWARM = bytes(range(32))
ANNOUNCERS = 100
CONVERGED_S = 60.0
EPOCH_S = 1_800_000_000.0  # unix time at the start
LOOK_S = 1.0

check_once = functools.lru_cache(maxsize=100_000)(verify)  # 100 readers of each record in one process


def unix_s() -> float:
    return EPOCH_S + asyncio.get_running_loop().time()


async def until(holds: Callable[[], bool], what: str) -> None:
    """Wait until it holds."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + CONVERGED_S
    while not holds():
        assert loop.time() < deadline_s, what
        await asyncio.sleep(LOOK_S)


async def join(world: FakeWorld, door: str, number: int) -> Directory:
    """An announcer that has found the door."""
    network = world.join(record_validator=record_validator(SWARM, check_once, unix_s))
    await network.connect([door], timeout_s=5)
    directory = Directory(network, SWARM, verify=check_once, sign=network.identity.sign, now=unix_s)
    start = 8 * (number % 3)
    directory.announce(Place(state=State.READY, span=(start, start + 8)), Introduction(name=f"announcer {number}"))
    return directory


@in_virtual_time
async def test_a_hundred_announcers_converge() -> None:
    world = FakeWorld(seed=1, clock=unix_s)
    world.default_path = Path(latency_s=0.02)
    (door,) = await world.join().addresses()
    directories = [await join(world, door, number) for number in range(ANNOUNCERS)]
    everybody = {directory.network.peer_id for directory in directories}

    def all_see(peer: str, span: tuple[int, int]) -> bool:
        seen = [one.peers().get(peer) for one in directories[2:]]
        return all(announcement is not None and announcement.span == span for announcement in seen)

    try:
        await asyncio.gather(*(directory.start() for directory in directories))
        await until(lambda: all(set(directory.peers()) == everybody for directory in directories), "all see all")
        mover, leaver, *others = directories
        mover.announce(Place(span=(16, 24)))
        await until(lambda: all_see(mover.network.peer_id, (16, 24)), "all see the move")
        await leaver.close()
        await until(lambda: all(leaver.network.peer_id not in one.peers() for one in others), "all see who left")
    finally:
        await asyncio.gather(*(directory.close() for directory in directories))
