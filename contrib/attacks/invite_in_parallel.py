"""Eight peers use an invite for one at the same moment, at different members, and claim to have joined long ago."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.swarm.records.invite import Role, admit_peer
from tests.membership.test_access_control import SESSION, Peer, Town
from tests.swarm.society import NOW, SWARM, Ticket

VIRTUAL, FAST = True, True
MEMBERS, THIEVES = 4, 8
RACE_S, LOOKS_S = 61, 1.0


async def attack() -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        town = Town(Path(folder))
        members = [await town.peer(f"member {number}", Ticket(f"{number}")) for number in range(MEMBERS)]
        invite = Ticket("once", role=Role.CLIENT, uses=1)
        friend = await town.peer("friend", invite)
        await friend.ask(members[0], SESSION)
        await asyncio.sleep(LOOKS_S)  # the members tell one another
        town.now += RACE_S
        thieves = [await town.peer(f"thief {number}", invite) for number in range(THIEVES)]
        for number, thief in enumerate(thieves):  # signed with the invite's key, which they have
            when = (NOW - 10_000 * number, NOW + RACE_S)[number % 2]
            thief.membership.certificate = admit_peer(invite.grant, invite.key, SWARM, thief.id, when)
        race = [thief.gets_in(members[number % MEMBERS]) for number, thief in enumerate(thieves)]
        at_once = sum(await asyncio.gather(*race))
        await asyncio.sleep(LOOKS_S)
        town.now += RACE_S
        later = sum([await thief.gets_in(member) for thief in thieves for member in members])
        friends = sum([await friend.gets_in(member) for member in members])
        corners = await _race(town, members)
        for peer in town.peers:
            await peer.close()
    return Outcome(
        at_once == 0 and later == 0 and friends == MEMBERS and len(corners) == 1,
        f"of {THIEVES} {at_once} got in at once, and at {later} of {THIEVES * MEMBERS} doors later; "
        f"whom the invite was for gets in at {friends} of {MEMBERS}; "
        f"of {THIEVES} that use another one at once {len(corners)} stays",
    )


async def _race(town: Town, members: list[Peer]) -> set[str]:
    """Let `THIEVES` peers use a fresh invite for one at once; return the ids of those that a member still admits after the
    members have compared notes."""
    invite = Ticket("another", role=Role.CLIENT, uses=1)
    racers = [await town.peer(f"racer {number}", invite) for number in range(THIEVES)]
    for racer in racers:
        racer.membership.certificate = admit_peer(invite.grant, invite.key, SWARM, racer.id, town.now)
    await asyncio.gather(*(racer.gets_in(members[number % MEMBERS]) for number, racer in enumerate(racers)))
    await asyncio.sleep(LOOKS_S)
    town.now += RACE_S
    return {racer.id for racer in racers for member in members if await racer.gets_in(member)}


main(__name__, attack, virtual=VIRTUAL)
