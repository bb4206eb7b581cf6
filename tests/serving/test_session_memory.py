"""What sessions keep besides caches is promised from the ledger, or they are not let in; those that are in go on."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Open
from swarmnode.errors import Busy
from swarmnode.ledger import Account
from swarmnode.serving.session.opening import journal_bytes
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm, expected

PROMPT = [5, 17, 3, 99, 42]


@in_virtual_time
async def test_journals_of_open_sessions_are_in_the_ledger_and_come_back() -> None:
    swarm = await ToySwarm.start((0, 1), (1, 4))
    first, last = swarm.volunteers
    tokens = []
    async for token in swarm.ring(PROMPT, 8):
        tokens.append(token)
        (session,) = first.server._sessions.values()
        reserved_bytes = first.ledger.accounts()[Account.JOURNALS]
        assert reserved_bytes == journal_bytes(session.opened, hidden_size=1)
        assert session._downstream.journal_bytes <= reserved_bytes
        assert last.ledger.accounts()[Account.JOURNALS] > 0  # its outputs
    assert tokens == expected(PROMPT, 8)
    await asyncio.sleep(0.5)
    assert [one.ledger.accounts()[Account.JOURNALS] for one in swarm.volunteers] == [0, 0]


@in_virtual_time
async def test_without_room_for_a_journal_the_new_session_is_refused_and_the_old_one_goes_on() -> None:
    swarm = await ToySwarm.start((0, 1), (1, 4))
    first = swarm.volunteers[0]
    stream = aiter(swarm.ring(PROMPT, 8))
    tokens = [await anext(stream)]
    first.ledger.limit_bytes = first.ledger.used_bytes + 1000
    with pytest.raises(Busy):
        await anext(aiter(swarm.ring([1, 2, 3], 4)))
    async for token in stream:
        tokens.append(token)
    assert tokens == expected(PROMPT, 8)
    await asyncio.sleep(0.5)
    first.ledger.limit_bytes = first.ledger.used_bytes + 40_000
    assert [token async for token in swarm.ring([1, 2, 3], 4)] == expected([1, 2, 3], 4)


@in_virtual_time
async def test_no_number_of_sessions_takes_more_than_the_ledger_has() -> None:
    """Sessions of the embedding alone reserve no cache; they are bounded all the same."""
    swarm = await ToySwarm.start((0, 1), (1, 4))
    first = swarm.volunteers[0]
    assert [token async for token in swarm.ring([1, 2, 3], 4)] == expected([1, 2, 3], 4)
    await asyncio.sleep(0.5)
    first.ledger.limit_bytes = limit_bytes = first.ledger.used_bytes + 100_000  # beside its links
    results = await asyncio.gather(
        *(anext(aiter(swarm.ring([number, 2, 3], 20))) for number in range(1, 30)), return_exceptions=True
    )
    assert first.ledger.peak_bytes <= limit_bytes
    assert any(isinstance(result, int) for result in results)
    assert all(isinstance(result, int | Busy) for result in results)


def test_a_journal_is_as_large_as_what_may_come() -> None:
    route = (HopSpec("a", 0, 2), HopSpec("b", 2, 4))
    opened = Open(bytes(16), 0, route, 0, Mode.RING, rows=3, max_length=100)
    assert journal_bytes(opened, 512) >= 100 * 3 * 512 * 4
    assert journal_bytes(opened, 512) < 100 * 3 * (512 * 4 + 1024)
