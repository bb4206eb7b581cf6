"""A hop opens its client's session elsewhere with the last possible epoch, to lock the client out of it."""

from __future__ import annotations

import asyncio

from attack import Outcome, main

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Open
from swarmnode.links.switchboard import Switchboard
from swarmnode.serving.client.client_session import SESSION_PROTOCOL
from tests.peer.toy_swarm import HELLO, ToySwarm, expected, link_config

VIRTUAL, FAST = True, True
LAST_EPOCH = 2**32 - 1
PROMPT, TOKENS, TAKEN_AT = [5, 17, 3, 99, 42], 40, 5


async def attack() -> Outcome:
    swarm = await ToySwarm.start((0, 2), (2, 4), (0, 2))
    thief = swarm.world.join()
    await thief.connect(await swarm.client.addresses(), timeout_s=1)
    board = Switchboard(thief, SESSION_PROTOCOL, HELLO, link_config())
    swarm.router.suspect = lambda _peer, _reason: None  # type: ignore[method-assign]  # whoever is there announces itself again
    victim, tokens, epoch = swarm.volunteers[1], list[int](), 0
    async for token in swarm.ring(PROMPT, TOKENS):
        tokens.append(token)
        if len(tokens) == TAKEN_AT:
            (session,) = victim.server._sessions.values()
            route = (HopSpec(thief.peer_id, 0, 2), HopSpec(victim.peer, 2, 4))
            said = session.opened
            forged = Open(session.id, LAST_EPOCH, route, 1, Mode.RING, 1, said.max_length, sampling=said.sampling)
            channel = await board.call(victim.peer, lambda _frame, _body: None, lambda _error: None)
            channel.send(forged)
            await asyncio.sleep(0.1)
            epoch = session.epoch
            swarm.world.kill(swarm.volunteers[0].peer)  # and now its client needs another route
    return Outcome(
        epoch == LAST_EPOCH and tokens == expected(PROMPT, TOKENS),
        f"taken over in epoch {epoch}; its client got {len(tokens)} of {TOKENS} tokens",
    )


main(__name__, attack, virtual=VIRTUAL)
