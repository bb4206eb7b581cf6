"""A node with several devices: its span lies over them, or on each; whoever uses it notices only that there is more of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.capacity.capacity import limit_bytes_for, unit_sizes
from swarmnode.compute.executor import Urgency, WorkItem
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.errors import ExecutorDied, LocalError
from swarmnode.ledger import Account
from swarmnode.lending.lending import Keep, LendingState
from swarmnode.metrics import table
from swarmnode.plan.view import view_of
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import PASS_S, VirtualMember, VirtualSwarm, pass_s
from tests.tiny import PROMPT, TinyModel

TOKENS = 12
CACHE_TOKENS = 64
OTHER_PROMPT = PROMPT[::-1]


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmnode.compute.device.usable_cores", lambda: 2)
    monkeypatch.setattr("swarmnode.compute.device.free_memory", lambda: None)


def lent_bytes(tiny: TinyModel, share: float) -> int:
    """Of two devices, each of which has room for so much of the model."""
    sizes = unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32)
    return 2 * limit_bytes_for(int(share * sizes.need_bytes(0, tiny.units, CACHE_TOKENS)))


@contextlib.asynccontextmanager
async def two_devices(
    founded: Founded, folder: Path, memory_bytes: int, *, cost_s: Any = pass_s, span: str | None = None
) -> AsyncIterator[tuple[VirtualSwarm, VirtualMember, SwarmClient]]:
    """A node with two devices of one core each, and a client."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        config = {"device": "cpu:0,cpu:1", "memory_bytes": memory_bytes, "cache_tokens": CACHE_TOKENS}
        member = swarm.node("both", span, cost_s=cost_s, **config)
        await member.wait_for("ready")
        async with swarm.client() as client:
            yield swarm, member, client


def parts(member: VirtualMember) -> dict[str, float]:
    """What each part of the span has computed, in positions times units, by its label."""
    found = [reading for reading in member.node.readings() if reading.metric is table.UNIT_TOKENS]
    labels = {reading.labels[0] for reading in found}
    return {label: sum(float(one.value) for one in found if one.labels[0] == label) for label in labels}  # type: ignore[arg-type]


def held(member: VirtualMember, account: Account) -> int:
    host = member.node._host
    assert host is not None
    return host.link_config.ledger.accounts()[account]


@in_virtual_time
async def test_a_span_that_fits_on_neither_lies_over_both(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_devices(founded, tmp_path, lent_bytes(tiny, 0.7)) as (_, member, client):
        results = await asyncio.gather(
            *(client.generate(prompt, max_new_tokens=TOKENS, drafts="off") for prompt in (PROMPT, OTHER_PROMPT))
        )
        assert [result.ids for result in results] == [tiny.alone(one, TOKENS) for one in (PROMPT, OTHER_PROMPT)]
        assert len(results[0].route) == 1
        computed = parts(member)
        assert set(computed) == {"0:3", "3:6"} and len(set(computed.values())) == 1
        told = member.node.describe()
        assert told["tokens"] == 2 * (len(PROMPT) + TOKENS - 1) and told["unit_tokens"] == told["tokens"] * tiny.units
        await asyncio.sleep(1.0)
        assert held(member, Account.KV_CACHE) == held(member, Account.JOURNALS) == 0
        await member.stop()
        assert held(member, Account.WEIGHTS) == held(member, Account.ACTIVATIONS) == 0


@in_virtual_time
async def test_a_span_that_fits_on_each_is_on_both_and_they_do_twice_as_much(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    def by_position(item: WorkItem) -> float:
        return PASS_S * max(1, item.size)

    async with two_devices(founded, tmp_path, lent_bytes(tiny, 1.5), cost_s=by_position) as (_, member, client):
        now = asyncio.get_running_loop().time
        began_s = now()
        alone = await client.generate(PROMPT, max_new_tokens=TOKENS)
        alone_s, began_s = now() - began_s, now()
        results = await asyncio.gather(
            *(client.generate(prompt, max_new_tokens=TOKENS) for prompt in (PROMPT, OTHER_PROMPT))
        )
        assert now() - began_s < 1.25 * alone_s
        assert [result.ids for result in (alone, *results)] == [
            tiny.alone(prompt, TOKENS) for prompt in (PROMPT, PROMPT, OTHER_PROMPT)
        ]
        weight_bytes = sum(unit_sizes(Checkpoint(tiny.folder), dtype=torch.float32).weight_bytes)
        assert 2 * weight_bytes <= held(member, Account.WEIGHTS) <= 2.1 * weight_bytes


@pytest.mark.parametrize("share", [0.7, 1.5], ids=["over both", "on each"])
@in_virtual_time
async def test_what_several_sessions_get_is_announced_beside_what_one_gets(
    founded: Founded, tiny: TinyModel, tmp_path: Path, share: float
) -> None:
    async with two_devices(founded, tmp_path, lent_bytes(tiny, share)) as (_, member, _client):
        host = member.node._host
        assert host is not None and host.directory.own is not None
        assert host.directory.own.parallel_speedup == pytest.approx(2.0)
        (seen,) = view_of(tiny.units, [host.directory.own]).peers
        assert seen.assumed_units_per_s == host.directory.own.decode_units_per_s > 0


@pytest.mark.parametrize("share", [0.7, 1.5], ids=["over both", "on each"])
@in_virtual_time
async def test_pausing_frees_both_devices(founded: Founded, tiny: TinyModel, tmp_path: Path, share: float) -> None:
    async with two_devices(founded, tmp_path, lent_bytes(tiny, share)) as (_, member, client):
        assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)
        for keep in Keep:
            member.node.lending.pause("a film", keep=keep)
            await member.node.lending.until(LendingState.PAUSED)
            assert bool(held(member, Account.WEIGHTS)) is (keep is Keep.MEMORY)
            assert not held(member, Account.ACTIVATIONS)
            member.node.lending.resume()
            await member.node.lending.until(LendingState.RUNNING)
            while not client.status()["covered"]:
                await client.changed()
            assert (await client.generate(PROMPT, max_new_tokens=4)).ids == tiny.alone(PROMPT, 4)


@in_virtual_time
async def test_a_device_that_is_lost_is_the_end_of_the_node(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_devices(founded, tmp_path, lent_bytes(tiny, 0.7)) as (_, member, _client):
        second = member.node._executors[1]

        def lose() -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        with pytest.raises(ExecutorDied):
            await second.call(Urgency.CONTROL, lose, kind="lose the device")
        with pytest.raises(ExecutorDied, match="device-side assert"):
            await member.task


@in_virtual_time
async def test_what_fits_on_no_device_and_not_on_both(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"layers 0 to 5 need .* are lent"):
        async with two_devices(founded, tmp_path, lent_bytes(tiny, 0.4), span=f"0:{tiny.units}"):
            pass


@in_virtual_time
async def test_a_device_that_is_not_here_is_told_before_anybody_hears_of_the_node(
    founded: Founded, tmp_path: Path
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        for device, reason in (("cpu:0,cpu:2", "no device cpu:2: there are 2 cores"), ("cuda:7", "no device 'cuda:7'")):
            member = swarm.node(device, device=device)
            with pytest.raises(LocalError, match=reason):
                await member.task
            assert not member.node.has_joined
