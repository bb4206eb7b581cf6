"""A text that begins as an earlier one did is computed from where it differs; and what is kept makes room for whoever needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.metrics import table
from swarmnode.serving.client.generation import Generation
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualSwarm, sees_ready
from tests.tiny import PROMPT, TinyModel

LONG = PROMPT * 8  # 64 tokens
NEW = 12
TWO_BY_TWO = {"a1": "0:3", "b1": "3:6", "a2": "0:3", "b2": "3:6"}


@contextlib.asynccontextmanager
async def swarm_of(
    founded: Founded, folder: Path, spans: dict[str, str], **stage: Any
) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in spans.items():
            swarm.node(name, span, **stage)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            await sees_ready(client, len(spans))
            yield swarm, client


def reading(swarm: VirtualSwarm, metric: Any) -> int:
    nodes = [member.node for member in swarm.members.values() if not member.over]
    return sum(int(one.value) for node in nodes for one in node.readings() if one.metric is metric)  # type: ignore[arg-type]


async def ask(client: SwarmClient, prompt: list[int], owner: str | None = "me", **options: Any) -> Generation:
    stream = await client.stream(prompt, kept_for=owner, **{"max_new_tokens": NEW, "drafts": "off", **options})
    async for _ in stream:
        pass
    return stream.result


@in_virtual_time
async def test_ten_turns_compute_their_new_tokens_only(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as (swarm, client):
        said = list(LONG)
        for turn in range(10):
            before = reading(swarm, table.TOKENS)
            result = await ask(client, said)
            assert reading(swarm, table.ANSWERS) == 2 * (turn + 1), "an answer of each hop, a turn"
            assert result.ids == tiny.alone(said, NEW), f"turn {turn}"
            fresh = len(said) - result.cached_tokens + NEW - 1
            assert reading(swarm, table.TOKENS) - before == 2 * fresh, "at both hops"
            assert turn == 0 or fresh == 4 + NEW - 1, "the last one's last token, three of ours, and what it says"
            said += [*result.ids, 7, turn, 9]
        await asyncio.sleep(0.5)  # they hear of it
        assert reading(swarm, table.SESSIONS) == 0, "what is kept is no load"


@in_virtual_time
async def test_a_text_that_parts_goes_on_from_there(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as (_, client):
        await ask(client, [*LONG, 1, 2, 3])
        for other in ([*LONG, 1, 5], [*LONG, 9, 9, 9, 9], LONG[:56], LONG):
            result = await ask(client, list(other), temperature=0.0)
            assert result.ids == tiny.alone(list(other), NEW)
            assert result.cached_tokens >= min(len(other), 60) - 25


@in_virtual_time
async def test_a_text_goes_on_elsewhere_when_who_kept_it_is_gone(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with swarm_of(founded, tmp_path, TWO_BY_TWO) as (swarm, client):
        first = await ask(client, list(LONG))
        said = [*LONG, *first.ids, 3]
        await swarm.member(first.route[1].peer).kill()
        second = await ask(client, said)
        assert second.ids == tiny.alone(said, NEW)
        said += [*second.ids, 4]
        for hop in second.route:
            await swarm.member(hop.peer).kill()
        await asyncio.sleep(5.0)
        await swarm.node("c", "0:6").wait_for("ready")
        third = await ask(client, said)
        assert third.ids == tiny.alone(said, NEW) and third.cached_tokens == 0


@in_virtual_time
async def test_what_others_have_said_cannot_be_timed(founded: Founded, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, {"a": "0:3", "b": "3:6"}) as (swarm, client):
        await ask(client, list(LONG), owner="alice")
        before = reading(swarm, table.TOKENS)
        result = await ask(client, list(LONG), owner="mallory")
        assert result.cached_tokens == 0
        assert reading(swarm, table.TOKENS) - before == 2 * (len(LONG) + NEW - 1), "all of it is computed"
        async with swarm.client() as stranger:
            assert (await ask(stranger, list(LONG), owner="alice")).cached_tokens == 0


@in_virtual_time
async def test_what_is_kept_makes_room(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """The one that rests for the longest goes first, also for another text of the same peer."""
    room = {"cache_tokens": 512, "max_cache_tokens": 512}
    async with swarm_of(founded, tmp_path, {"a": "0:6"}, **room) as (_, client):
        prompts = [[number, *LONG[:40]] for number in range(12)]
        for prompt in prompts:
            assert (await ask(client, prompt)).ids == tiny.alone(prompt, NEW)
        assert (await ask(client, [*prompts[-1], 5])).cached_tokens == len(prompts[-1])
        assert (await ask(client, [*prompts[0], 5])).cached_tokens == 0
        long = list(LONG * 5)
        assert (await ask(client, long)).ids == tiny.alone(long, NEW), "it takes the room of many"


@in_virtual_time
async def test_who_leaves_keeps_nothing(founded: Founded, tmp_path: Path) -> None:
    async with swarm_of(founded, tmp_path, {"a": "0:6"}) as (swarm, client):
        await ask(client, list(LONG))
        began_s = asyncio.get_running_loop().time()
        member = swarm.members["a"]
        member.leave()
        await member.task
        assert asyncio.get_running_loop().time() - began_s < 15.0, "it waits for nobody"
