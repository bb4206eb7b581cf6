"""Who gets the cache of a session from a node that leaves, and what a hop does that cannot go on from it."""

from __future__ import annotations

import asyncio

import pytest
import torch

from swarmnode.codec.body import HopSpec
from swarmnode.codec.handover_messages import HANDOVER_PROTOCOL, CacheReply, GetCache
from swarmnode.codec.messages import Truncate, Want
from swarmnode.compute.serving.states import SessionCopy
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.links.switchboard import Switchboard
from swarmnode.peer.questions import ask_one
from swarmnode.plan.compression import takes_over
from swarmnode.serving.client.session_spec import ids_entry
from swarmnode.serving.server import MOST_HANDED_OVER
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import HELLO, ToySwarm, link_config
from tests.serving.test_branches import PROMPT, Opener, settle


@in_virtual_time
async def test_only_a_node_that_drains_gives_the_cache_of_a_known_session(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = await ToySwarm.start((0, 4))
    opener, (volunteer,) = Opener(swarm), swarm.volunteers
    asked: list[tuple[tuple[int, int], int]] = []

    async def copy_out(_key: int, units: tuple[int, int], most: int) -> SessionCopy:
        asked.append(((*units,), most))
        return SessionCopy(most, {(0, ("conv", 0)): torch.zeros(1, 2, 3)})

    monkeypatch.setattr(volunteer.server.pipelines[0], "copy_out", copy_out)
    session, channel = await opener.source()
    board = Switchboard(swarm.client, HANDOVER_PROTOCOL, HELLO, link_config())

    async def ask(**changes: object) -> ErrorCode | int:
        fields = {"session": session, "start": 1, "end": 3, "most": 500, **changes}
        try:
            reply, payload = await ask_one(board, volunteer.peer, GetCache(**fields), CacheReply)  # type: ignore[arg-type]
        except PeerRefused as error:
            return error.code
        assert len(payload) == 24
        return reply.length

    assert await ask() is ErrorCode.NO_SESSION, "it stays"
    volunteer.server.draining = True
    wrong = ({"session": bytes(16)}, {"end": 5}, {"start": 3}, {"adapter": "other"}, {"truncations": 1})
    assert [await ask(**each) for each in wrong] == [ErrorCode.NO_SESSION] * len(wrong)
    assert not asked
    assert await ask() == len(PROMPT), "no more than it has"
    assert await ask(most=7) == 7
    channel.send(Truncate(1, 3))
    entry = ids_entry(3, [[1, 2, 3, 4]], Want.NOTHING)
    channel.send(entry.body, seq=3, payload=entry.payload)
    await settle()
    assert await ask() is ErrorCode.NO_SESSION, "another text"
    assert await ask(truncations=1) == 7
    more = [await ask(truncations=1) for _ in range(MOST_HANDED_OVER)]
    assert more == [7] * (MOST_HANDED_OVER - 3) + [ErrorCode.NO_SESSION] * 3
    await board.close()


@in_virtual_time
async def test_a_model_without_states_asks_nobody_for_a_cache() -> None:
    """Its OPEN names hops that left, as of any model: the text is computed again, at once."""
    opener = Opener(await ToySwarm.start((0, 4)))
    began_s = asyncio.get_running_loop().time()
    leaving = (HopSpec("a peer that is not there", 0, 4),)
    await opener.open(leaving=leaving, known=20)
    assert [type(body).__name__ for body in opener.heard] == ["Ready"]
    assert asyncio.get_running_loop().time() - began_s < 3.0


@pytest.mark.parametrize(
    ("cache", "text", "replay_s", "bps", "expected"),
    [
        (0, 10**6, 9.0, 1e9, False),  # there is none
        (10**5, 10**6, 0.0, 0.0, True),  # smaller than the text
        (10**6, 10**5, 0.1, 1e7, False),  # 0.72 s more on the way
        (10**6, 10**5, 1.0, 1e7, True),
        (10**7, 10**8, 60.0, 1e7, False),  # too late for READY
        (10**7, 10**3, 0.2, 1e9, True),
    ],
)
def test_a_cache_is_fetched_if_it_is_smaller_or_comes_sooner(
    cache: int, text: int, replay_s: float, bps: float, expected: bool
) -> None:
    assert takes_over(cache, text, replay_s, bps, within_s=1.5) is expected
