"""Prompts that begin alike and come at once: one computes the beginning, whatever becomes of it, and nobody else learns of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.executor import WorkItem
from swarmnode.errors import Busy, SwarmnodeError
from swarmnode.metrics import table
from swarmnode.serving.client.generation import Generation
from swarmnode.serving.client.prefix_cache import LEAST_SHARED, Beginnings
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_kept_sessions import NEW, TWO_BY_TWO, ask, reading, swarm_of
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import TinyModel

TWO = {"a": "0:3", "b": "3:6"}
MANY = 6
COMMON = 2 * LEAST_SHARED
POSITION_S = 0.002  # of a pass, for each position
DICE = random.Random(5)
PREFIX = [DICE.randrange(3, 60) for _ in range(COMMON)]
PROMPTS = [[*PREFIX, 61, number, 3][: COMMON + 2 + number % 2] for number in range(3, 3 + MANY)]


def by_positions(item: WorkItem) -> float:
    """What a device takes: long enough that others come while a prompt is computed."""
    return POSITION_S * max(1, item.size)


def tails(prompts: Sequence[Sequence[int]], common: int = COMMON) -> int:
    """Positions that are computed where each begins with a beginning that is there."""
    return sum(len(prompt) - common + NEW - 1 for prompt in prompts)


async def at_once(client: SwarmClient, prompts: Sequence[list[int]], owner: str = "me") -> list[Generation]:
    return list(await asyncio.gather(*(ask(client, prompt, owner) for prompt in prompts)))


async def until(holds: Callable[[], object]) -> None:
    """Wait until something is so."""
    for _ in range(10_000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")


async def until_computing(swarm: VirtualSwarm, positions: int) -> None:
    """Wait until so many positions were computed, over all hops."""
    await until(lambda: reading(swarm, table.TOKENS) >= positions)


@in_virtual_time
async def test_one_of_many_computes_the_beginning(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO, cost_s=by_positions) as (swarm, client):
        results = await at_once(client, PROMPTS)
        assert [one.ids for one in results] == [tiny.alone(prompt, NEW) for prompt in PROMPTS]
        assert [one.cached_tokens for one in results] == [0] + [COMMON + 1] * (MANY - 1)  # all say 61 after it
        assert reading(swarm, table.TOKENS) == 2 * (COMMON + 1 + tails(PROMPTS, COMMON + 1)), "at both hops"
        alone_s = results[0].first_token_s
        assert max(one.first_token_s for one in results) <= 1.3 * alone_s


@in_virtual_time
async def test_who_comes_later_shares_what_still_turns(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO, cost_s=by_positions) as (swarm, client):
        stream = await client.stream(PROMPTS[0], kept_for="me", max_new_tokens=NEW)
        tokens = aiter(stream)
        await anext(tokens)
        before = reading(swarm, table.TOKENS)
        second = await ask(client, PROMPTS[1])
        assert second.ids == tiny.alone(PROMPTS[1], NEW) and second.cached_tokens == COMMON + 1
        assert reading(swarm, table.TOKENS) - before <= 2 * (tails(PROMPTS[1:2], COMMON + 1) + NEW)
        assert [token.id async for token in tokens] == tiny.alone(PROMPTS[0], NEW)[1:]


@in_virtual_time
async def test_a_small_part_of_what_is_kept_is_copied(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """So that its own text may go on with it, too."""
    long = [*PREFIX[:300], *[7, 8, 9] * 150]
    other = [*PREFIX[:300], 5, 5]
    async with swarm_of(founded, tmp_path, {"a": "0:6"}) as (_, client):
        first = await ask(client, long)
        branched = await ask(client, other)
        assert branched.ids == tiny.alone(other, NEW) and branched.cached_tokens == 300
        turn = [*long, *first.ids, 4]
        went_on = await ask(client, turn)
        assert went_on.ids == tiny.alone(turn, NEW) and went_on.cached_tokens == len(long) + NEW - 1


@pytest.mark.parametrize("compress", ["int8", "bf16"])
@in_virtual_time
async def test_states_that_travel_compressed(founded: Founded, tmp_path: Path, compress: str) -> None:
    """Pieces of a prompt that can only be sent whole are computed again by the first hop, where a later one lacks them."""
    prompts = [[*PREFIX[:500], 61, number] for number in (3, 4)]
    async with swarm_of(founded, tmp_path, TWO, cost_s=by_positions) as (swarm, client):
        alone = [await ask(client, prompt, f"{number}", compress=compress) for number, prompt in enumerate(prompts)]
        before = reading(swarm, table.TOKENS)
        results = await asyncio.gather(*(ask(client, prompt, compress=compress) for prompt in prompts))
        assert [one.ids for one in results] == [one.ids for one in alone]
        assert results[1].cached_tokens >= 256
        assert reading(swarm, table.TOKENS) - before < 2 * (501 + 250 + 2 * NEW)
        exact = await ask(client, prompts[1])
        assert exact.cached_tokens == 0, "what was computed from less is of no use to it"


@in_virtual_time
async def test_the_first_one_is_given_up(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO, cost_s=by_positions) as (swarm, client):
        tasks = [asyncio.create_task(ask(client, prompt)) for prompt in PROMPTS]
        await until_computing(swarm, COMMON)
        tasks[0].cancel()
        results = await asyncio.gather(*tasks[1:])
        assert [one.ids for one in results] == [tiny.alone(prompt, NEW) for prompt in PROMPTS[1:]]
        assert reading(swarm, table.TOKENS) <= 2 * (2 * COMMON + tails(PROMPTS)), (
            "the next one computed it, and no other"
        )


@pytest.mark.parametrize("place", [0, 1])
@in_virtual_time
async def test_a_hop_of_the_first_one_is_killed(founded: Founded, tiny: TinyModel, tmp_path: Path, place: int) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO, cost_s=by_positions) as (swarm, client):
        tasks = [asyncio.create_task(ask(client, prompt)) for prompt in PROMPTS]
        busy: list[VirtualMember] = []
        names = [f"{'ab'[place]}{number}" for number in (1, 2)]
        await until(
            lambda: busy.extend(swarm.members[name] for name in names if tokens_of(swarm.members[name])) or busy
        )
        await busy[0].kill()
        results = await asyncio.gather(*tasks)
        assert [one.ids for one in results] == [tiny.alone(prompt, NEW) for prompt in PROMPTS]


def tokens_of(member: VirtualMember) -> float:
    return sum(one.value for one in member.node.readings() if one.metric is table.TOKENS)


@in_virtual_time
async def test_a_hop_of_the_first_one_hangs(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO, cost_s=by_positions) as (swarm, client):
        tasks = [asyncio.create_task(ask(client, prompt)) for prompt in PROMPTS]
        await until_computing(swarm, COMMON)
        busy = next(one for one in swarm.members.values() if tokens_of(one))
        with busy.hanging():
            results = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)
        assert [one.ids for one in results] == [tiny.alone(prompt, NEW) for prompt in PROMPTS]


@in_virtual_time
async def test_nobody_waits_for_long(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """A first one that never comes to an output, though nothing fails: after the time in which a session must show something
    the others compute for themselves."""
    async with swarm_of(founded, tmp_path, TWO, cost_s=by_positions) as (_, client):
        stuck = client.__dict__["_beginnings"].enter("me", PROMPTS[0], await idle_session(client))
        began_s = asyncio.get_running_loop().time()
        results = await at_once(client, PROMPTS[1:3])
        assert [one.ids for one in results] == [tiny.alone(prompt, NEW) for prompt in PROMPTS[1:3]]
        assert (
            client.config.progress_s <= asyncio.get_running_loop().time() - began_s <= client.config.progress_s + 10.0
        )
        client.__dict__["_beginnings"].leave(stuck)


async def idle_session(client: SwarmClient) -> Any:
    """A session that was never opened."""
    stream = await client.stream(PROMPTS[0], max_new_tokens=NEW)
    return stream.__dict__["_ring"].session


@in_virtual_time
async def test_who_fails_holds_up_nobody(founded: Founded, tmp_path: Path) -> None:
    """Where there is no room for any of them, each is told so, in the time that it takes one."""
    room = {"cache_tokens": 448, "max_cache_tokens": 448}
    async with swarm_of(founded, tmp_path, {"a": "0:6"}, **room) as (_, client):
        outcomes = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS), return_exceptions=True)
        assert all(isinstance(one, SwarmnodeError) for one in outcomes), outcomes
        assert asyncio.get_running_loop().time() < MANY * client.config.patience_s


@in_virtual_time
async def test_memory_is_promised_for_each(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """A copy is a copy: what has room for two takes two at a time, and the others when these are done."""
    length = len(PROMPTS[0]) + NEW
    room = {"cache_tokens": 2 * length + 40, "max_cache_tokens": 2 * length + 40}
    async with swarm_of(founded, tmp_path, {"a": "0:6"}, **room) as (swarm, client):
        outcomes = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS), return_exceptions=True)
        for prompt, one in zip(PROMPTS, outcomes, strict=True):
            assert isinstance(one, Busy) or (isinstance(one, Generation) and one.ids == tiny.alone(prompt, NEW)), one
        assert sum(isinstance(one, Generation) for one in outcomes) >= 2
        assert reading(swarm, table.CACHE_RESERVED) <= reading(swarm, table.CACHE_SIZE)


@in_virtual_time
async def test_what_others_say_at_the_same_time_cannot_be_timed(founded: Founded, tmp_path: Path) -> None:
    """Whether what another key asks for just now begins alike or not: the same work, and to the same microsecond."""

    async def mallory(of_alice: list[int], folder: Path) -> tuple[int, float, int]:
        async with swarm_of(founded, folder, TWO, cost_s=by_positions) as (swarm, client):
            alice = asyncio.create_task(ask(client, of_alice, "alice"))
            await until_computing(swarm, COMMON // 2)
            result = await ask(client, PROMPTS[1], "mallory")
            await alice
            return result.cached_tokens, round(result.first_token_s, 6), reading(swarm, table.TOKENS)

    other = [token ^ 1 for token in PROMPTS[0]]
    folders = [tmp_path / "same", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    same = await mallory(PROMPTS[0], folders[0])
    assert same[0] == 0
    assert same == await mallory(other, folders[1])


def test_a_client_without_sessions_says_so() -> None:
    assert repr(Beginnings()) == "<Beginnings: 0 texts kept, 0 prompts under way>"
