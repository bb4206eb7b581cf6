"""What breaks, and what the user sees of it: the same text, after a short pause."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.body import HopSpec
from swarmnode.compute.executor import Urgency
from swarmnode.errors import ExecutorDied, LocalError
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.serving.client.generation import Generation
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm
from tests.tiny import PROMPT, TinyModel

TOKENS = 48
KILL_STALL_S = 1.0
HANG_STALL_S = 3.0
SPANS = {"a1": "0:3", "a2": "0:3", "b1": "3:6", "b2": "3:6"}

Strike = Callable[[Sequence[HopSpec]], Awaitable[None]]


@contextlib.asynccontextmanager
async def two_by_two(founded: Founded, folder: Path) -> AsyncIterator[tuple[VirtualSwarm, Bootstrap, SwarmClient]]:
    """Two stages of two replicas each, their door, and a client that sees all of them."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        door = await swarm.bootstrap()
        for name, span in SPANS.items():
            swarm.node(name, span)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            while sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"]) < 4:
                await client.changed()
            yield swarm, door, client


async def generate_and(client: SwarmClient, at: int, strike: Strike, **options: Any) -> Generation:
    """Generate; at token number `at` await `strike(route)`."""
    stream = await client.stream(PROMPT, max_new_tokens=TOKENS, **options)
    number = 0
    async for _ in stream:
        number += 1
        if number == at:
            await strike(stream.result.route)
    return stream.result


@in_virtual_time
async def test_a_text_that_is_whole_needs_its_hops_no_more(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """Though nobody has read it to its end yet: to open it again would ask for outputs beyond the last."""
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for _ in stream:
            if len(stream.result.ids) == 1:
                await asyncio.sleep(10)  # of virtual time, in which all of it comes
                for hop in stream.result.route:
                    await swarm.member(hop.peer).kill()
                await asyncio.sleep(10)
        assert stream.result.ids == tiny.alone(PROMPT, TOKENS)
        assert stream.result.reroutes == 0


@pytest.mark.parametrize("at", [1, 2, 17, TOKENS - 1])
@pytest.mark.parametrize("hops", [(0,), (1,), (0, 1)], ids=["first", "last", "both"])
@in_virtual_time
async def test_killed_nodes_do_not_change_the_text(
    founded: Founded, tiny: TinyModel, tmp_path: Path, at: int, hops: Sequence[int]
) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):

        async def strike(route: Sequence[HopSpec]) -> None:
            for hop in hops:
                await swarm.member(route[hop].peer).kill()

        result = await generate_and(client, at, strike)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        assert result.reroutes >= 1 or at == TOKENS - 1  # the last token may be on its way already
        assert result.longest_stall_s <= KILL_STALL_S


@in_virtual_time
async def test_a_replacement_counts_what_others_have_drawn(founded: Founded, tmp_path: Path) -> None:
    """Penalties depend on the whole text, of which a hop that takes over has seen no token."""
    options = {"seed": 4, "temperature": 0.9, "repetition_penalty": 1.1, "frequency_penalty": -1.5, "logprobs": 2}
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        expected = await client.generate(PROMPT, max_new_tokens=TOKENS, **options)

        async def strike(route: Sequence[HopSpec]) -> None:
            for hop in route:
                await swarm.member(hop.peer).kill()

        result = await generate_and(client, 17, strike, **options)
        assert result.reroutes >= 1
        assert result.ids == expected.ids
        own = [[told[0].logprob for told in one.logprobs] for one in (result, expected)]
        assert own[0] == pytest.approx(own[1], abs=1e-4), "a replay computes in other chunks"
        assert len(set(result.ids)) < TOKENS, "a penalty that forgot would show"


@pytest.mark.parametrize("hop", [0, 1], ids=["first", "last"])
@in_virtual_time
async def test_a_node_whose_device_is_lost_says_so_and_ends(
    founded: Founded, tiny: TinyModel, tmp_path: Path, hop: int
) -> None:
    """Not a peer that announces READY and answers nobody: the text goes on elsewhere at once, the process ends with the reason."""

    def fault() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        struck = []

        async def strike(route: Sequence[HopSpec]) -> None:
            member = swarm.member(route[hop].peer)
            struck.append(member)
            (executor,) = member.node._executors
            with pytest.raises(ExecutorDied):
                await executor.call(Urgency.CONTROL, fault, kind="try")

        result = await generate_and(client, 17, strike)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        assert result.longest_stall_s <= KILL_STALL_S
        with pytest.raises(ExecutorDied, match="device-side assert"):
            await struck[0].task


@in_virtual_time
async def test_a_node_of_which_a_part_dies_of_a_bug_says_so_and_ends(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    """What the node announces must not outlive what does the work."""

    async def bug() -> None:
        raise ZeroDivisionError("a mistake")

    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        struck = []

        async def strike(route: Sequence[HopSpec]) -> None:
            member = swarm.member(route[0].peer)
            struck.append(member)
            assert member.node._host is not None
            member.node._host._tasks.spawn(bug(), "bug")

        result = await generate_and(client, 17, strike)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        with pytest.raises(LocalError, match="a mistake"):
            await struck[0].task


@pytest.mark.parametrize("hop", [0, 1], ids=["first", "last"])
@in_virtual_time
async def test_a_hung_node_is_left_and_cannot_disturb_when_it_wakes(
    founded: Founded, tiny: TinyModel, tmp_path: Path, hop: int
) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        with contextlib.ExitStack() as hung:

            async def strike(route: Sequence[HopSpec]) -> None:
                hung.enter_context(swarm.member(route[hop].peer).hanging())

            result = await generate_and(client, 10, strike)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        assert result.reroutes >= 1
        assert result.longest_stall_s <= HANG_STALL_S
        again = await client.generate(PROMPT, max_new_tokens=TOKENS)
        assert again.ids == result.ids


@in_virtual_time
async def test_a_leaving_node_hands_its_sessions_over(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        leaving: list[Any] = []

        async def strike(route: Sequence[HopSpec]) -> None:
            leaving.append(swarm.member(route[1].peer))
            leaving[0].leave()

        result = await generate_and(client, 10, strike)
        await leaving[0].task
        assert leaving[0].seen[-1]["event"] == "left"
        assert result.ids == tiny.alone(PROMPT, TOKENS)
        assert result.longest_stall_s <= KILL_STALL_S


@in_virtual_time
async def test_the_swarm_serves_without_its_bootstrap_peer(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, door, client):
        swarm.world.kill(door.host.peer_id)
        result = await client.generate(PROMPT, max_new_tokens=TOKENS)
        assert result.ids == tiny.alone(PROMPT, TOKENS)
