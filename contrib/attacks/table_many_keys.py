"""A stranger stores one signed record under hundreds of invented keys, and invented records under one key, to fill the table."""

from __future__ import annotations

import time

from attack import Outcome, main

from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import key_digest
from swarmnode.net.kademlia import RecordStore, key_id
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.peers.shards import SAMPLE
from swarmnode.swarm.records.announcement import VERSION, Announcement, sign_announcement

VIRTUAL, FAST = True, True
SWARM = bytes(32)
STRANGERS = "203.0.113.0/24"
KEYS, IDENTITIES, MEMBERS = 511, 600, 30


def record(identity: Identity, now: float) -> bytes:
    said = Announcement(VERSION, SWARM, identity.peer_id, int(now), now, now + 600, now)
    return sign_announcement(said, identity.sign)


async def attack() -> Outcome:
    now, store = time.time(), RecordStore()
    valid = record_validator(SWARM, verify, time.time)

    def put(key: bytes, identity: Identity, group: str) -> bool:
        subkey, value = identity.peer_id.encode(), record(identity, now)
        believed = valid(key_digest(key), subkey, value, now + 600)
        return believed and store.store(key_id(key), subkey, value, now + 600, Claimant(group, identity.peer_id))

    sample = SAMPLE.key(SWARM)
    stranger = Identity.generate()
    spread = sum(put(b"invented %d" % number, stranger, STRANGERS) for number in range(KEYS))
    crowd = sum(put(sample, Identity.generate(), STRANGERS) for _ in range(IDENTITIES))
    members = sum(put(sample, Identity.generate(), f"198.51.{number}.0/24") for number in range(MEMBERS))
    return Outcome(
        spread == 0 and members == MEMBERS,
        f"{spread} of {KEYS} invented keys taken; {crowd} of {IDENTITIES} invented peers taken while there was room, then "
        f"{members} of {MEMBERS} members",
    )


main(__name__, attack, virtual=VIRTUAL)
