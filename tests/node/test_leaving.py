"""Ctrl-C once and twice, at whatever moment: the node is gone soon, and nothing of it goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm

TURNS = range(
    3, 11
)  # of the loop, in which the word that it leaves comes back to those of its tasks that wait for news
MOMENTS = ("joined", "machine", "loading", "ready")
SOON_S = 10.0


async def gone(member: VirtualMember) -> None:
    """In order, or interrupted."""
    _, pending = await asyncio.wait({member.task}, timeout=SOON_S)
    assert not pending, f"{member!r} still runs: {member.task.get_stack()}"
    assert member.task.cancelled() or member.task.exception() is None


@in_virtual_time
async def test_twice_while_it_waits_for_a_reason_to_move(founded: Founded, tmp_path: Path) -> None:
    """Before Python 3.12, what waits with `wait_for` hears nothing of a cancellation that comes together with its news."""
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for turns in TURNS:
            member = swarm.node(f"node{turns}", "0:6")
            await member.wait_for("ready")
            await asyncio.sleep(5.0)
            member.leave()
            for _ in range(turns):
                await asyncio.sleep(0)
            member.task.cancel()
            await gone(member)


@in_virtual_time
async def test_once_or_twice_as_it_comes(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for moment in MOMENTS:
            for times in (1, 2):
                member = swarm.node(f"{moment}{times}", "0:6")
                await member.wait_for(moment)
                member.leave()
                if times == 2:
                    await asyncio.sleep(0)
                    member.task.cancel()
                await gone(member)
