"""A stranger tries identities until 40 of them make 30 peers look like a hundred thousand, so that all announce rarely."""

from __future__ import annotations

import asyncio

from attack import Outcome, main

from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.peers import shards
from swarmnode.swarm.peers.directory import Directory, DirectoryConfig
from swarmnode.swarm.records.announcement import MAX_LIFE_S, VERSION, Announcement, Place, sign_announcement

VIRTUAL, FAST = True, True
SWARM = bytes(32)
PEERS, FORGED = 30, 40
WORTH = 1 / 1000  # share of all digests that are small enough for the attacker
MINUTES_S = 120.0


def sign(_data: bytes) -> bytes:
    return b"signed"  # signatures are not part of this attack


def verify(_peer: str, _data: bytes, signature: bytes) -> bool:
    return signature == b"signed"


async def attack() -> Outcome:
    world = FakeWorld(seed=1)
    networks = [world.join() for _ in range(PEERS)]
    loop = asyncio.get_running_loop()
    epoch_s = world.clock() - loop.time()
    world.clock = lambda: epoch_s + loop.time()
    directories = []
    for network in networks:
        await network.connect(await networks[0].addresses(), timeout_s=5)
        directory = Directory(network, SWARM, verify=verify, sign=sign, now=world.clock)
        directory.announce(Place(span=(0, 2)))
        await directory.start()
        directories.append(directory)
    await asyncio.sleep(10)
    before_s = DirectoryConfig().publish_period_s(directories[0].crowd)

    tried = (f"tried {number}" for number in range(1_000_000))
    forged = [
        peer
        for peer, _ in zip((each for each in tried if shards.digest_share(each) < WORTH), range(FORGED), strict=False)
    ]
    for peer in forged:
        now = world.clock()
        said = Announcement(VERSION, SWARM, peer, int(now * 1000), now, now + MAX_LIFE_S, now)
        record = sign_announcement(said, sign)
        await networks[1].dht.store(shards.SAMPLE.key(SWARM), peer.encode(), record, expires_at=now + MAX_LIFE_S)
    await asyncio.sleep(MINUTES_S)
    looks = shards.peers_from_sample([*forged, *(network.peer_id for network in networks)])
    largest = max(directory.crowd for directory in directories)
    after_s = max(DirectoryConfig().publish_period_s(directory.crowd) for directory in directories)
    for directory in directories:
        await directory.close()
    return Outcome(
        after_s < 3 * before_s,
        f"the sample looks like {looks:.0f} peers; they take themselves for {largest:.0f} at most, and speak every {after_s:.1f} s "
        f"({before_s:.1f} before)",
    )


main(__name__, attack, virtual=VIRTUAL)
