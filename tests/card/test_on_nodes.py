"""Whole nodes on cards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.errors import ExecutorDied
from swarmnode.lending.lending import Keep, LendingState
from swarmnode.metrics import table
from swarmnode.net.tasks import cancel_and_wait
from tests.card.simulated import CARDS, SimulatedCards
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

TOKENS = 6
CACHE_TOKENS = 64


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return TinyModel.save(tmp_path / "tiny", layers=2)


@contextlib.asynccontextmanager
async def starting_on(model: Path, folder: Path, **stage: Any) -> AsyncIterator[tuple[VirtualSwarm, VirtualMember]]:
    async with VirtualSwarm(folder) as swarm:
        swarm.create(model)
        await swarm.bootstrap()
        yield swarm, swarm.node("volunteer", cache_tokens=CACHE_TOKENS, capture="off", **stage)


@contextlib.asynccontextmanager
async def node_on(model: Path, folder: Path, **stage: Any) -> AsyncIterator[tuple[VirtualMember, SwarmClient]]:
    async with starting_on(model, folder, **stage) as (swarm, member):
        await member.wait_for("ready")
        async with swarm.client() as client:
            yield member, client


@pytest.mark.parametrize("share", [0.7, 1.5], ids=["over both", "on each"])
@in_virtual_time
async def test_two_cards_of_one_node(cards: SimulatedCards, tiny: TinyModel, tmp_path: Path, share: float) -> None:
    need_bytes = unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32).need_bytes(0, tiny.units, CACHE_TOKENS)
    memory_bytes = limit_bytes_for(int(share * need_bytes))
    async with node_on(tiny.folder, tmp_path, device="all", memory_bytes=memory_bytes) as (member, client):
        assert (await client.generate(PROMPT, max_new_tokens=TOKENS)).ids == tiny.alone(PROMPT, TOKENS)
        used = {reading.labels: reading.value for reading in member.node.readings() if reading.metric is table.SPEED}
        assert len(used) == (2 if share < 1 else 1), "parts of the span"
        assert all(cards.counts(card).used_bytes > 0.3 * min(share, 1.0) * need_bytes for card in range(CARDS))


@in_virtual_time
async def test_numbers_too_large_for_an_older_card(cards: SimulatedCards, tiny: TinyModel, tmp_path: Path) -> None:
    """bfloat16 has them, and float16 is what such a card computes in."""
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e7)
    model.save_pretrained(tmp_path / "large")
    cards.majors = [7] * CARDS
    async with node_on(tmp_path / "large", tmp_path, device="cuda:1") as (member, client):
        (peer,) = (peer for peer in client.status()["peers"] if peer["peer"] == member.peer)
        assert peer["number_format"] == "float32"
        assert len((await client.generate(PROMPT, max_new_tokens=TOKENS)).ids) == TOKENS


@pytest.mark.parametrize(
    ("moment", "again"),
    [("machine", False), ("loading", False), ("ready", False), ("loading", True)],
    ids=["before it loads", "while it loads", "when it is ready", "while it moves in again"],
)
@in_virtual_time
async def test_a_card_that_is_lost_ends_the_node_with_that_reason(
    cards: SimulatedCards, tiny: TinyModel, tmp_path: Path, moment: str, again: bool
) -> None:
    """Then the command begins anew; anything else would be told as an error of the program."""
    moments = [moment] * (1 + again)
    async with starting_on(tiny.folder, tmp_path, device="cuda:1") as (swarm, member):
        tell = member.tell

        def lose(event: str, text: str, **details: Any) -> None:
            tell(event, text, **details)
            if moments and event == moments[0]:
                moments.pop(0)
                cards.lose(not moments)

        member.tell = lose  # type: ignore[method-assign]
        if again:
            await member.wait_for("ready")
            member.node.lending.pause("a try", keep=Keep.DISK)
            await member.node.lending.until(LendingState.PAUSED)
            member.node.lending.resume()
        async with contextlib.AsyncExitStack() as asking:
            if moment == "ready":
                client = await asking.enter_async_context(swarm.client())
                speaking = asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=TOKENS))
                asking.push_async_callback(cancel_and_wait, speaking)
            with pytest.raises(ExecutorDied, match="device-side assert"):
                await asyncio.wait_for(member.task, 600)


@in_virtual_time
async def test_a_card_that_is_lost_while_its_node_leaves(
    cards: SimulatedCards, tiny: TinyModel, tmp_path: Path
) -> None:
    """It leaves, and waits for nothing."""
    async with node_on(tiny.folder, tmp_path, device="cuda:1") as (member, client):
        speaking = asyncio.ensure_future(client.generate(PROMPT, max_new_tokens=40))
        await asyncio.sleep(0.05)
        member.leave()
        cards.lose()
        await asyncio.wait({member.task}, timeout=60)
        assert member.over and not isinstance(member.task.exception(), RuntimeError)
        await cancel_and_wait(speaking)
