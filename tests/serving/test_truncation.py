"""Positions are taken back and others sent in their place: the text is the one without them, also when hops are lost."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.codec.messages import Mode, Truncate, Want
from swarmnode.links.hop import Hop
from swarmnode.links.switchboard import Switchboard
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import HELLO, ToySwarm, expected, link_config, unpack

PROMPT = [5, 17, 3, 99, 42]
THREE = [(0, 1), (1, 3), (3, 4)]
DRAFTS = [1, 2, 3]  # none of them right


class Drafting:
    """A client that sends drafts after each token, and takes them back."""

    def __init__(self, swarm: ToySwarm) -> None:
        spec = SessionSpec(Mode.DRIVEN, max_length=60, width=1)
        clock = asyncio.get_running_loop().time
        self.session = ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=clock)

    async def say(self, start: int, ids: list[int]) -> int:
        """What comes after these."""
        self.session.send(ids_entry(start, [ids], Want.LAST), expect=start + len(ids))
        received = await self.session.receive()
        assert received.output.tensor is not None
        return unpack(received.output.tensor, received.payload)[-1]

    async def token(self, position: int, token: int) -> int:
        """The next one after `token`, with drafts that were wrong."""
        await self.say(position, [token, *DRAFTS])
        assert self.session.length == position + 4
        return await self.say(position, [token])


@pytest.mark.parametrize("killed", [None, 0, 1, 2], ids=["nobody", "first", "middle", "last"])
@in_virtual_time
async def test_the_text_is_as_if_nothing_had_been_taken_back(killed: int | None) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    drafting = Drafting(swarm)
    await drafting.session.start()
    tokens = [await drafting.say(0, PROMPT)]
    while len(tokens) < 10:
        tokens.append(await drafting.token(len(PROMPT) + len(tokens) - 1, tokens[-1]))
        if killed is not None and len(tokens) == 5:
            swarm.world.kill(swarm.volunteers[killed].peer)
    assert tokens == expected(PROMPT, 10)
    for one in swarm.volunteers[:3]:
        assert all(session.transcript.received.length == 0 for session in one.server._sessions.values())
    await drafting.session.close()
    await asyncio.sleep(0.5)
    assert sum(one.server.load for number, one in enumerate(swarm.volunteers) if number != killed) == 0


@in_virtual_time
async def test_drafts_that_are_on_their_way_when_a_hop_is_lost_are_forgotten_too() -> None:
    """The hops that stay hold what the new one never hears of."""
    for killed in range(3):
        swarm = await ToySwarm.start(*THREE, *THREE)
        drafting = Drafting(swarm)
        await drafting.session.start()
        tokens = [await drafting.say(0, PROMPT)]
        while len(tokens) < 6:
            position = len(PROMPT) + len(tokens) - 1
            drafting.session.send(ids_entry(position, [[tokens[-1], *DRAFTS]], Want.NOTHING))
            if len(tokens) == 3:
                swarm.world.kill(swarm.volunteers[killed].peer)
            tokens.append(await drafting.say(position, [tokens[-1]]))
        assert tokens == expected(PROMPT, 6)
        await drafting.session.close()


@in_virtual_time
async def test_a_journal_keeps_no_more_than_what_holds() -> None:
    swarm = await ToySwarm.start(*THREE)
    hop = Hop(Switchboard(swarm.client, SESSION_PROTOCOL, HELLO, link_config()), lambda *_: None, lambda *_: None)
    hop.send(ids_entry(0, [PROMPT], Want.NOTHING))
    for number in range(1, 50):
        start = 5 + number
        hop.send(ids_entry(hop.end, [[number] * (start + 8 - hop.end)], Want.NOTHING))
        entry = ids_entry(start, [[number]], Want.NOTHING)
        hop.send(type(entry)(start, 1, entry.body, entry.payload, hop.truncation(start)))
        assert hop.end == start + 1
        assert hop.journal_bytes == 8 * hop.end
    assert hop.truncation(0) == Truncate(50, 0)
