"""Guessed tokens never change a text: right and wrong ones, on any route, through kills, hangs and departures."""

from __future__ import annotations

import asyncio

import pytest

from swarmnode.swarm.records.announcement import ServingLoad
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import ToySwarm, expected
from tests.serving.drafting import Drafts, toy_drafting
from tests.serving.live_swarm import LiveSwarm

PROMPT = [5, 17, 3, 99, 42]
ROUTES = {"one hop": [(0, 4)], "two hops": [(0, 2), (2, 4)], "four hops": [(0, 1), (1, 2), (2, 3), (3, 4)]}
THREE = [(0, 1), (1, 3), (3, 4)]
COUNT = 40
TEXT = PROMPT + expected(PROMPT, COUNT)


async def settle() -> None:
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0], ids=["right", "mixed", "wrong"])
@pytest.mark.parametrize("spans", ROUTES.values(), ids=ROUTES)
@in_virtual_time
async def test_the_text_is_the_one_without_guesses(spans: list[tuple[int, int]], wrong: float) -> None:
    swarm = await ToySwarm.start(*spans)
    drafts = Drafts(swarm, TEXT, wrong=wrong)
    stream = swarm.ring(PROMPT, COUNT)
    assert [token async for token in stream] == TEXT[len(PROMPT) :]
    assert stream.result.reroutes == 0
    accepted, (budget,) = stream.result.accepted_drafts, drafts.budgets
    assert accepted == budget.accepted
    assert accepted >= {0.0: COUNT * 0.8, 0.3: 8, 1.0: 0}[wrong]
    assert (budget.rejected == 0) == (wrong == 0) and (accepted == 0) == (wrong == 1)
    await settle()
    assert swarm.loads == [0] * len(spans)


@in_virtual_time
async def test_right_guesses_save_turns_of_the_ring() -> None:
    took_s = []
    for most in (0, 8):
        swarm = await ToySwarm.start(*THREE)
        if most:
            Drafts(swarm, TEXT, most=most)
        stream = swarm.ring(PROMPT, COUNT)
        assert [token async for token in stream] == TEXT[len(PROMPT) :]
        took_s.append(stream.result.seconds - stream.result.first_token_s)
    assert took_s[1] < took_s[0] / 4


@pytest.mark.parametrize("harm", ["kill", "hang"])
@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@pytest.mark.parametrize("after", [1, 2, 9, 20])
@pytest.mark.parametrize("wrong", [0.0, 0.3], ids=["right", "mixed"])
@in_virtual_time
async def test_a_hop_that_fails_with_guesses_in_flight_changes_nothing(
    harm: str, index: int, after: int, wrong: float
) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    Drafts(swarm, TEXT, wrong=wrong)
    victim = swarm.volunteers[index].peer
    stream = swarm.ring(PROMPT, COUNT)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == after:
            getattr(swarm.world, harm)(victim)
    assert tokens == TEXT[len(PROMPT) :]
    assert stream.result.longest_stall_s < 4.0
    await settle()
    assert [load for one, load in zip(swarm.volunteers, swarm.loads, strict=True) if one.peer != victim] == [0] * 5


@pytest.mark.parametrize("seed", range(6))
@in_virtual_time
async def test_one_failure_after_another(seed: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE, *THREE)
    Drafts(swarm, TEXT, wrong=0.1 * seed, most=4 + seed)
    victims = iter(swarm.volunteers[:6])
    tokens = []
    async for token in swarm.ring(PROMPT, COUNT):
        tokens.append(token)
        if len(tokens) % 5 == seed % 5 and (victim := next(victims, None)) is not None:
            swarm.world.kill(victim.peer)
    assert tokens == TEXT[len(PROMPT) :]


@pytest.mark.parametrize("index", [0, 1, 2], ids=["first", "middle", "last"])
@in_virtual_time
async def test_a_leaving_hop_is_left_without_a_stall(index: int) -> None:
    swarm = await ToySwarm.start(*THREE, *THREE)
    Drafts(swarm, TEXT, wrong=0.2)
    leaving = swarm.volunteers[index]
    draining: asyncio.Future[None] | None = None
    stream = swarm.ring(PROMPT, COUNT)
    tokens = []
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 9:
            draining = asyncio.ensure_future(leaving.server.drain(5.0))
    assert tokens == TEXT[len(PROMPT) :]
    assert draining is not None
    await draining
    assert stream.result.longest_stall_s < 0.5
    assert leaving.peer not in swarm.router.suspected


@in_virtual_time
async def test_a_stop_token_that_was_guessed_ends_the_text() -> None:
    swarm = await ToySwarm.start(*THREE)
    Drafts(swarm, TEXT)
    stop = TEXT[len(PROMPT) + 6]
    tokens = [token async for token in swarm.ring(PROMPT, COUNT, stop_ids=(stop,))]
    assert tokens == TEXT[len(PROMPT) : TEXT.index(stop, len(PROMPT)) + 1]


@in_virtual_time
async def test_sessions_that_guess_do_not_mix() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))

    drafts = [
        Drafts(swarm, PROMPT[:number] + expected(PROMPT[:number], 20), wrong=0.2 * number) for number in range(1, 6)
    ]
    for one in swarm.volunteers:  # whose text it is shows in the length of its prompt
        one.server.drafting = lambda opened: drafts[opened.sampling.prompt_length - 1].of(opened)  # type: ignore[union-attr]

    async def run(number: int) -> list[int]:
        return [token async for token in swarm.ring(PROMPT[:number], 20)]

    texts = await asyncio.gather(*map(run, range(1, 6)))
    assert texts == [expected(PROMPT[:number], 20) for number in range(1, 6)]


@in_virtual_time
async def test_nothing_is_guessed_on_a_route_with_a_hop_that_takes_no_guesses() -> None:
    """A hop of an older version announces none."""
    swarm = await LiveSwarm.start([(0, 2), (2, 4)], clients=1, drafting=toy_drafting(0.0))
    (client,) = swarm.clients
    assert (await client.generate(PROMPT, 20)).accepted_drafts > 0
    swarm.volunteers[1].directory.announce(ServingLoad(drafts=0))
    await asyncio.sleep(3.0)
    await client.directory.refresh()
    result = await client.generate(PROMPT, 20)
    assert result.ids == TEXT[len(PROMPT) :][:20] and result.accepted_drafts == 0


@in_virtual_time
async def test_a_client_that_wants_no_guesses_gets_none() -> None:
    swarm = await ToySwarm.start(*THREE)
    drafts = Drafts(swarm, TEXT)
    stream = swarm.ring(PROMPT, 10, drafts="off")
    assert [token async for token in stream] == TEXT[len(PROMPT) :][:10]
    assert stream.result.accepted_drafts == 0 and not drafts.budgets
    assert stream.result.tokens_per_turn == 1.0
