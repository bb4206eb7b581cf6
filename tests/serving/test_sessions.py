"""Sessions over routes of peers that die, hang, leave or are full: the tokens must be those of the whole model."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error, Mode, Open, Ready, Want
from swarmnode.config import ServerConfig
from swarmnode.errors import Busy, ErrorCode, NoRoute, PeerRefused, SwarmnodeError
from swarmnode.ledger import Account
from swarmnode.links.hop import ENTRY_BYTES
from swarmnode.net.interfaces import Stream
from swarmnode.serving.client.client_session import ClientSession
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm, expected, unpack

PROMPT = [5, 17, 3, 99, 42]
ROUTES = {"one hop": [(0, 4)], "two hops": [(0, 2), (2, 4)], "four hops": [(0, 1), (1, 2), (2, 3), (3, 4)]}
THREE = [(0, 1), (1, 3), (3, 4)]  # a first, a middle and a last hop


async def settle() -> None:
    """Until everything that was sent has arrived and was answered."""
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("spans", ROUTES.values(), ids=ROUTES)
@in_virtual_time
async def test_the_ring_draws_what_the_whole_model_draws(spans: list[tuple[int, int]]) -> None:
    swarm = await ToySwarm.start(*spans)
    stream = swarm.ring(PROMPT, 12)
    assert [token async for token in stream] == expected(PROMPT, 12)
    assert stream.result.reroutes == 0
    await settle()
    assert swarm.loads == [0] * len(spans)


@in_virtual_time
async def test_what_a_client_keeps_for_sending_it_again_is_in_its_ledger() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    journals = []
    async for _ in swarm.ring(PROMPT, 8):
        journals.append(swarm.switchboard.ledger.accounts()[Account.JOURNALS])
    grows = {later - earlier for earlier, later in itertools.pairwise(journals)}
    assert journals[0] >= len(PROMPT) * 8
    assert grows - {0} == {ENTRY_BYTES + 8}, "a token each, but for the last, which nothing follows"
    assert swarm.switchboard.ledger.accounts()[Account.JOURNALS] == 0


@in_virtual_time
async def test_sessions_do_not_mix() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))

    async def run(prompt: list[int]) -> list[int]:
        return [token async for token in swarm.ring(prompt, 10)]

    prompts = [[number, 2 * number, 7] for number in range(1, 6)]
    assert await asyncio.gather(*map(run, prompts)) == [expected(prompt, 10) for prompt in prompts]


@in_virtual_time
async def test_a_stop_token_ends_the_generation() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    whole = expected(PROMPT, 8)
    stop = whole[3]
    tokens = [token async for token in swarm.ring(PROMPT, 8, stop_ids=(stop,))]
    assert tokens == whole[: whole.index(stop) + 1]


@pytest.mark.parametrize("harm", ["kill", "hang"])
@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("after", [1, 7])
@in_virtual_time
async def test_a_hop_that_fails_is_replaced_and_the_tokens_stay_the_same(harm: str, index: int, after: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    victim = swarm.volunteers[index].peer
    stream = swarm.ring(PROMPT, 15)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == after:
            getattr(swarm.world, harm)(victim)
    assert tokens == expected(PROMPT, 15)
    assert stream.result.reroutes >= 1
    assert stream.result.longest_stall_s < 4.0
    assert [hop.peer for hop in stream.result.route][index] == swarm.volunteers[index + 3].peer
    await asyncio.sleep(10.0)  # while the client dials a hop that others say is lost
    assert set(swarm.router.suspected) == {victim}
    assert [load for one, load in zip(swarm.volunteers, swarm.loads, strict=True) if one.peer != victim] == [0] * 5


@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("met", [True, False], ids=["met before", "never met"])
@in_virtual_time
async def test_a_hop_that_hangs_as_it_is_opened_costs_less_than_3_s(met: bool, index: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE, *THREE)
    first, second = swarm.volunteers[index], swarm.volunteers[index + 3]
    assert [token async for token in swarm.ring(PROMPT, 5)] == expected(PROMPT, 5)
    if not met:
        swarm.router.suspect(first.peer, "for another one to be called that nobody has a link to")
    swarm.world.hang((first if met else second).peer)
    stream = swarm.ring(PROMPT, 5)
    assert [token async for token in stream] == expected(PROMPT, 5)
    assert max(stream.result.first_token_s, stream.result.longest_stall_s) < 3.0


@pytest.mark.parametrize("harm", ["kill", "hang"])
@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@in_virtual_time
async def test_hops_that_stay_compute_nothing_again(harm: str, index: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    victim = swarm.volunteers[index]
    tokens = []
    async for token in swarm.ring(PROMPT, 25):
        tokens.append(token)
        if len(tokens) == 7:
            getattr(swarm.world, harm)(victim.peer)
    assert tokens == expected(PROMPT, 25)
    kept = [one.worker.positions for one in swarm.volunteers[:3] if one is not victim]
    assert kept == [len(PROMPT) + 24] * 2


@in_virtual_time
async def test_one_failure_after_another() -> None:
    swarm = await ToySwarm.start(*THREE, *THREE, *THREE)
    victims = iter(swarm.volunteers[:6])
    tokens = []
    async for token in swarm.ring(PROMPT, 30):
        tokens.append(token)
        if len(tokens) % 4 == 0 and (victim := next(victims, None)) is not None:
            swarm.world.kill(victim.peer)
    assert tokens == expected(PROMPT, 30)


@in_virtual_time
async def test_a_leaving_hop_is_left_without_a_stall() -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    leaving = swarm.volunteers[1]
    draining: asyncio.Future[None] | None = None
    stream = swarm.ring(PROMPT, 20)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 5:
            draining = asyncio.ensure_future(leaving.server.drain(5.0))
    assert tokens == expected(PROMPT, 20)
    assert draining is not None
    await draining
    assert leaving.server.load == 0
    assert stream.result.longest_stall_s < 0.5
    assert leaving.peer not in swarm.router.suspected  # it did no wrong
    assert stream.result.faults == [(leaving.peer, "DRAINING")]


@in_virtual_time
async def test_a_driven_session_gives_the_output_of_each_input() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    spec = SessionSpec(Mode.DRIVEN, max_length=20)
    session = ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=asyncio.get_running_loop().time)
    await session.start()
    whole = expected(PROMPT, 6)
    session.send(ids_entry(0, [PROMPT], Want.LAST), expect=len(PROMPT))
    drawn = []
    for position in range(len(PROMPT), len(PROMPT) + 6):
        received = await session.receive()
        assert received.position == position and received.output.tensor is not None
        drawn += unpack(received.output.tensor, received.payload)
        session.send(ids_entry(position, [drawn[-1:]], Want.LAST), expect=position + 1)
    assert drawn == whole
    await session.close()
    await settle()
    assert swarm.loads == [0, 0]


@in_virtual_time
async def test_a_full_peer_is_passed_over_and_a_full_swarm_says_so() -> None:
    swarm = await ToySwarm.start((0, 4), (0, 4), cache_bytes=4 * 30)  # each holds one session of 25 positions
    streams = [aiter(swarm.ring(PROMPT, 20)) for _ in range(2)]
    first = [await anext(stream) for stream in streams]
    assert first == expected(PROMPT, 1) * 2
    assert swarm.loads == [1, 1]
    with pytest.raises(Busy, match="the swarm is full"):
        async for _ in swarm.ring(PROMPT, 20):
            pass
    for stream in streams:
        await stream.aclose()
    await settle()
    assert swarm.loads == [0, 0]
    assert [token async for token in swarm.ring(PROMPT, 20)] == expected(PROMPT, 20)


@in_virtual_time
async def test_patience_ends_where_nobody_serves_a_unit() -> None:
    swarm = await ToySwarm.start((0, 2))
    started_s = asyncio.get_running_loop().time()
    with pytest.raises(NoRoute, match="nobody serves unit 2"):
        async for _ in swarm.ring(PROMPT, 5):
            pass
    assert asyncio.get_running_loop().time() - started_s == pytest.approx(swarm.config.patience_s, abs=1.1)


@in_virtual_time
async def test_a_client_that_vanishes_is_forgotten_after_the_grace() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), config=ServerConfig(orphan_grace_s=3.0))
    await anext(aiter(stream := swarm.ring(PROMPT, 2000)))
    assert len(stream.result.ids) == 1
    swarm.world.kill(swarm.client.peer_id)
    await asyncio.sleep(2.0)
    assert swarm.loads[0] == 1
    await asyncio.sleep(2.0)
    assert swarm.loads == [0, 0]


@pytest.mark.parametrize(
    ("start", "ids", "code"),
    [
        (1, [[1]], ErrorCode.MALFORMED),  # a gap
        (0, [[1], [2]], ErrorCode.MALFORMED),  # two rows where one was opened
        (0, [list(range(11))], ErrorCode.TOO_LARGE),  # more than was reserved
    ],
    ids=["gap", "rows", "length"],
)
@in_virtual_time
async def test_an_input_that_breaks_the_rules_ends_its_session(
    start: int, ids: list[list[int]], code: ErrorCode
) -> None:
    swarm = await ToySwarm.start((0, 4))
    heard: list[Body] = []

    def hear(_frame: Frame, body: Body) -> None:
        heard.append(body)

    peer = swarm.volunteers[0].peer
    channel = await swarm.switchboard.call(peer, hear, lambda _error: None)
    channel.send(Open(bytes(16), 0, (HopSpec(peer, 0, 4),), 0, Mode.DRIVEN, 1, 10))
    entry = ids_entry(start, ids, Want.LAST)
    channel.send(entry.body, seq=start, payload=entry.payload)
    await settle()
    assert heard == [Ready(0), Error(code)]
    assert swarm.loads == [0]


@in_virtual_time
async def test_a_session_that_ends_as_it_is_opened_ends_at_every_hop() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    first, last = (volunteer.peer for volunteer in swarm.volunteers)
    route = (HopSpec(first, 0, 2), HopSpec(last, 2, 4))
    channel = await swarm.switchboard.call(first, lambda _frame, _body: None, lambda _error: None)
    channel.send(Open(bytes(16), 0, route, 0, Mode.DRIVEN, 1, 10))
    channel.close()
    await settle()
    assert swarm.loads == [0, 0]


@pytest.mark.parametrize("index", [0, 1], ids=["first", "last"])
@in_virtual_time
async def test_a_long_text_goes_on_where_a_hop_died(index: int) -> None:
    """Three quarters through 1,600 positions: a spare takes the place within the time of a prefill, and the text is the same."""
    swarm = await ToySwarm.start((0, 2), (2, 4), (0, 2), (2, 4), cache_bytes=100_000)
    swarm.config = replace(swarm.config, prompt_chunk_tokens=128)
    prompt, new = [(7 * position) % 90 for position in range(1100)], 500
    stream = swarm.ring(prompt, new)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 100:
            swarm.world.kill(swarm.volunteers[index].peer)
    assert tokens == expected(prompt, new)
    assert stream.result.longest_stall_s < 5.0


@in_virtual_time
async def test_a_bug_in_a_hop_is_told_to_the_client_and_another_hop_goes_on() -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)

    async def buggy(*_arguments: object, **_named: object) -> Stream:
        raise ZeroDivisionError("a bug, as nobody expected it")

    swarm.volunteers[0].network.open = buggy  # type: ignore[method-assign]
    stream = swarm.ring(PROMPT, 8)
    assert [token async for token in stream] == expected(PROMPT, 8)
    assert stream.result.route[0].peer == swarm.volunteers[3].peer
    assert swarm.router.suspected == [swarm.volunteers[0].peer], "where it failed another one did the same work"


@in_virtual_time
async def test_a_bug_in_the_client_ends_its_session_with_a_sentence() -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    stream = swarm.ring(PROMPT, 30)
    with pytest.raises(SwarmnodeError, match="bug in this client"):
        async for _ in stream:
            if len(stream.result.ids) == 4:
                swarm.router.suspected = None  # type: ignore[assignment]  # the router fails of what nobody expected
                swarm.world.kill(swarm.volunteers[1].peer)


@in_virtual_time
async def test_a_hop_that_fails_in_the_moment_in_which_it_is_open_is_replaced_at_once() -> None:
    """That fault is not lost with the opening: nobody else would tell, and all links are alive."""
    swarm, loop = await ToySwarm.start(*THREE, *THREE), asyncio.get_running_loop()
    session = ClientSession(
        swarm.switchboard, swarm.router, SessionSpec(Mode.DRIVEN, max_length=20), swarm.config, clock=loop.time
    )
    opens = session._open

    async def open_and_fail() -> None:
        await opens()
        if session.epoch == 1:
            session._fault(1, PeerRefused("leaving", code=ErrorCode.DRAINING, peer=session.route[0].peer))

    session._open = open_and_fail  # type: ignore[method-assign]
    await session.start()
    await settle()
    assert session.epoch == 2 and session.route[0].peer == swarm.volunteers[3].peer
    await session.close()
