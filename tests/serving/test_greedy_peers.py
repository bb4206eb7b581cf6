"""One peer that takes all it can get: others get theirs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmnode.codec.messages import Attach, Error, Input
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.compute.serving.cache import CacheBudget
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy
from swarmnode.ledger import Account, MemoryLedger
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.serving.session.session_memory import SessionMemory
from tests.net.virtual import in_virtual_time
from tests.peer.greedy import PROMPT, Greedy
from tests.peer.toy_swarm import ToySwarm, expected


@in_virtual_time
async def test_a_session_over_the_whole_cache_that_does_nothing_makes_room() -> None:
    swarm = await ToySwarm.start((0, 4), cache_bytes=1000)
    greedy = await Greedy(swarm).join()
    await greedy.open(1, 250)
    assert swarm.volunteers[0].server.free_cache_tokens == 0
    assert [token async for token in swarm.ring(PROMPT, 12)] == expected(PROMPT, 12)


@in_virtual_time
async def test_who_has_many_sessions_loses_some_to_who_has_none() -> None:
    swarm = await ToySwarm.start((0, 4), cache_bytes=1000)
    greedy = await Greedy(swarm).join()
    for number in range(30):
        await greedy.open(number, 25)
    server = swarm.volunteers[0].server
    assert server.load == 10 and greedy.refusals == 20
    assert [token async for token in swarm.ring(PROMPT, 40)] == expected(PROMPT, 40)
    assert server.load >= 7  # no more than was needed


@in_virtual_time
async def test_who_has_more_takes_nothing_from_who_has_less() -> None:
    swarm = await ToySwarm.start((0, 4), cache_bytes=1000)
    stream = aiter(swarm.ring(PROMPT, 100))
    tokens = [await anext(stream)]
    greedy = await Greedy(swarm).join()
    for number in range(30):
        await greedy.open(number, 25)
    assert greedy.refusals >= 24
    tokens += [token async for token in stream]
    assert tokens == expected(PROMPT, 100)


@in_virtual_time
async def test_a_session_that_nobody_uses_is_ended() -> None:
    swarm = await ToySwarm.start((0, 4), config=ServerConfig(forgotten_s=60.0))
    greedy = await Greedy(swarm).join()
    await greedy.open(1, 10)
    await asyncio.sleep(100)
    assert swarm.loads == [0]
    assert swarm.volunteers[0].ledger.accounts()[Account.JOURNALS] == 0


@in_virtual_time
async def test_a_full_swarm_tells_a_second_client_so() -> None:
    """Whoever would have more than the first one is not let in at its cost."""
    swarm = await ToySwarm.start((0, 4), cache_bytes=100)
    first = aiter(swarm.ring(PROMPT, 16))
    await anext(first)
    greedy = await Greedy(swarm).join()
    with pytest.raises(Busy):
        await anext(aiter(greedy.stream(16)))
    assert len([token async for token in first]) == 15


@in_virtual_time
async def test_subscriptions_to_nothing_push_out_only_their_own() -> None:
    swarm = await ToySwarm.start((0, 4))
    honest, greedy = await Greedy(swarm).join(), await Greedy(swarm).join()
    peer = swarm.volunteers[0].peer
    session = bytes([99] * 16)
    waiting = await honest.board.call(peer, lambda _frame, body: honest.heard.append(body), honest.heard.append)
    waiting.send(Attach(session, 1))
    await asyncio.sleep(0.1)
    for number in range(400):
        channel = await greedy.board.call(peer, lambda _frame, body: greedy.heard.append(body), greedy.heard.append)
        channel.send(Attach(number.to_bytes(16, "big"), 1))
    await asyncio.sleep(0.1)
    assert not honest.heard
    assert len(greedy.heard) >= 300


def memory(cache_bytes: int) -> SessionMemory:
    return SessionMemory([CacheBudget(cache_bytes)], MemoryLedger())


def of(peer: str) -> Claimant:
    """The first letter of the peer is its network."""
    return Claimant(peer[0], peer)


async def reserve(memory: SessionMemory, key: int, peer: str, size: int) -> bool:
    return memory.reserve(key, of(peer), cache_bytes=(size,), journal_bytes=0)


async def test_a_hundred_peers_of_one_network_hold_no_more_than_one() -> None:
    shares = memory(100)
    for number in range(10):
        assert await reserve(shares, number, f"a{number}", 10)
    assert shares.who_gives_way(of("b0"), (10,), 0, idle=[]) == [9]  # the last that came
    assert shares.who_gives_way(of("a99"), (10,), 0, idle=[]) == []  # its network has most of it already
    assert shares.who_gives_way(of("b0"), (10,), 0, idle=[3, 4]) == [3]  # the longest idle


async def test_who_computes_gives_way_only_to_who_would_have_less_than_half() -> None:
    shares = memory(100)
    for number in range(10):
        assert await reserve(shares, number, "a", 10)
    assert shares.who_gives_way(of("b"), (30,), 0, idle=[]) == [9, 8, 7]
    assert shares.who_gives_way(of("b"), (40,), 0, idle=[]) == []


async def test_nobody_is_cut_off_in_vain() -> None:
    shares = memory(100)
    for number in range(10):
        assert await reserve(shares, number, "a", 10)
    assert shares.who_gives_way(of("b"), (70,), 0, idle=list(range(10))) == []


@in_virtual_time
async def test_what_is_decoded_fits_the_session() -> None:
    """A descriptor of 131 kB of top-k may be of 8.6 GB: it is held against what the session has reserved."""
    swarm = await ToySwarm.start((0, 4))
    greedy = await Greedy(swarm).join()
    for number, shape in enumerate([(1, 1 << 20), (200, 1), (1, 11)]):
        channel = await greedy.open(number, 10)
        greedy.heard.clear()
        channel.send(Input(TensorInfo(Codec.NONE, DType.INT64, shape)), seq=0)
        await asyncio.sleep(0.1)
        assert [body.code for body in greedy.heard if isinstance(body, Error)]
    huge = TensorInfo(Codec.TOPK, DType.FLOAT32, (1, 1, 1 << 31), 0)
    channel = await greedy.open(9, 10)
    greedy.heard.clear()
    channel.send(Input(huge), seq=0)
    await asyncio.sleep(0.1)
    assert [body.code for body in greedy.heard if isinstance(body, Error)]
    assert swarm.loads == [0]


class Owners:
    """Of sessions, as the scheduler hears of them."""

    def __init__(self, worker: Any) -> None:
        self.seen: list[str] = []
        self._open = worker.open
        worker.open = self.open

    def open(self, session: int, *, owner: str = "", **reservation: Any) -> None:
        self.seen.append(owner)
        self._open(session, **reservation)


@in_virtual_time
async def test_a_devices_time_is_counted_for_who_asks_the_first_hop() -> None:
    """What a later hop sees is the hop before it, which asks for many."""
    swarm = await ToySwarm.start((0, 2), (2, 4))
    owners = [Owners(one.worker) for one in swarm.volunteers]
    assert [token async for token in swarm.ring([1, 2, 3], 4)] == expected([1, 2, 3], 4)
    assert [seen.seen for seen in owners] == [[swarm.client.peer_id], [""]]
