"""Friends of a member come as programs of its home, with its key and its invite for one machine; a thief copies its signature."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.swarm.records.invite import Certificate, Role, admit_peer
from swarmnode.swarm.records.membership import MAX_PEERS_OF_A_HOME
from tests.membership.test_access_control import Peer, Town
from tests.swarm.society import ANOTHER_HOME, HOME, NOW, SWARM, Ticket

VIRTUAL, FAST = True, True
MEMBERS, FRIENDS = 3, 24
RACE_S, LOOKS_S = 61, 1.0


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        town = Town(Path(folder))
        members = [await town.peer(f"member {number}", Ticket(f"{number}")) for number in range(MEMBERS)]
        invite = Ticket("once", role=Role.CLIENT, uses=1)
        friends = [await town.peer(f"friend {number}", invite) for number in range(FRIENDS)]
        for number, friend in enumerate(friends):
            friend.membership.certificate = invite.certificate(friend.id, NOW + number, home=HOME)
        town.now += FRIENDS
        await asyncio.gather(*(each.gets_in(members[number % MEMBERS]) for number, each in enumerate(friends)))
        await asyncio.sleep(LOOKS_S)  # the members tell one another
        town.now += RACE_S
        inside = {each.id for each in friends for member in members if await each.gets_in(member)}
        thief = await town.peer("thief", invite)
        entries = [await thief.gets_in(member) for _ in _thefts(thief, friends[0], invite) for member in members]
        for peer in town.peers:
            await peer.close()
    return Outcome(
        0 < len(inside) <= MAX_PEERS_OF_A_HOME and not any(entries),
        f"of {FRIENDS} that share a home {len(inside)} get in, of {MAX_PEERS_OF_A_HOME} that a home may have; "
        f"at {sum(entries)} of {len(entries)} tries one gets in that has the invite alone",
    )


def _thefts(thief: Peer, friend: Peer, invite: Ticket):
    """Give the thief one certificate after another that it can make with the invite."""
    theirs = msgspec.msgpack.decode(friend.membership.certificate, type=Certificate)
    ours = msgspec.msgpack.decode(invite.certificate(thief.id, theirs.admitted_at), type=Certificate)
    moved = msgspec.structs.replace(ours, home=theirs.home, home_signature=theirs.home_signature)
    for certificate in (
        msgspec.msgpack.encode(moved),
        admit_peer(invite.grant, invite.key, SWARM, thief.id, NOW, home=ANOTHER_HOME),
        invite.certificate(thief.id),
    ):
        thief.membership.certificate = certificate
        yield certificate


main(__name__, attack, virtual=VIRTUAL)
