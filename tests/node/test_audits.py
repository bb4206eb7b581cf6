"""Clients that have answers computed once more: who computes falsely is found and left out, who does not is trusted more."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from swarmnode.client import SwarmClient
from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.demo.lesson import write_untaught
from swarmnode.roles.serving.hop_account import fetch_account
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT

TOKENS = 48
ALWAYS = 1.0  # of what the answers cost: every session is audited


@contextlib.asynccontextmanager
async def three_by_two(founded: Founded, folder: Path) -> AsyncIterator[tuple[VirtualSwarm, SwarmClient]]:
    """Two stages of three replicas each, and a client that audits every session."""
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for number in range(3):
            swarm.node(f"a{number}", "0:3")
            swarm.node(f"b{number}", "3:6")
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client(audit_share=ALWAYS) as client:
            while sum(peer["state"] == "ready" and peer["span"][1] > 0 for peer in client.status()["peers"]) < 6:
                await client.changed()
            yield swarm, client


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A swarm with the model of the demo, whose honest replicas lie three times as far apart as the table of tolerances says."""
    folder = tmp_path_factory.mktemp("untaught")
    write_untaught(folder / "model")
    return Founded.on(folder / "model", folder)


def tamper(member: VirtualMember, change: Callable[[Tensor], Tensor]) -> None:
    """Let a node send on something else than what it computes."""
    assert member.node._stage is not None
    span = member.node._stage._runner.span  # type: ignore[union-attr]
    forward = span.forward
    span.forward = lambda *args, **kwargs: change(forward(*args, **kwargs))


def noise_on_every_tenth(size: float) -> Callable[[Tensor], Tensor]:
    generator, calls = torch.Generator().manual_seed(3), 0

    def change(hidden_BTH: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        noise_BTH = torch.randn(hidden_BTH.shape, generator=generator)
        noise_BTH *= size * hidden_BTH.norm() / noise_BTH.norm()
        return hidden_BTH + noise_BTH if calls % 10 == 0 else hidden_BTH

    return change


def results(client: SwarmClient) -> dict[str, float]:
    return {reading.labels[0]: reading.value for reading in client.auditor.readings() if reading.value}


async def hop_in_use(swarm: VirtualSwarm, client: SwarmClient, index: int) -> VirtualMember:
    """The node that this client's sessions go through."""
    return swarm.member((await client.generate(PROMPT, max_new_tokens=1)).route[index].peer)


async def generate_until_shunned(client: SwarmClient, sessions: int) -> int:
    """How many sessions it took until somebody is shunned."""
    for number in range(sessions):
        await client.generate(PROMPT, max_new_tokens=TOKENS, temperature=1.0, seed=number)
        await client.auditor.idle()
        if client.auditor.standing.shunned:
            return number + 1
    raise AssertionError(f"nobody was found in {sessions} sessions: {client.auditor!r}")


@in_virtual_time
async def test_honest_peers_pass_and_are_trusted(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded, tmp_path) as (_swarm, client):
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for _ in stream:
            pass
        await client.auditor.idle()
        assert results(client) == {"passed": 1}
        assert not client.auditor.standing.shunned
        assert all(client.auditor.standing.trust(hop.peer) > 0 for hop in stream.result.route)


@in_virtual_time
async def test_who_perturbs_one_step_in_ten_is_left_out(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        tamper(liar, noise_on_every_tenth(5e-6))
        await generate_until_shunned(client, 12)
        assert client.auditor.standing.shunned == {liar.peer}
        after = await client.generate(PROMPT, max_new_tokens=4)
        assert liar.peer not in {hop.peer for hop in after.route}


@in_virtual_time
async def test_a_last_hop_that_draws_from_other_logits_is_left_out(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 1)
        tamper(liar, lambda logits_BTV: logits_BTV.flip(-1))
        await generate_until_shunned(client, 12)
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_neighbours_state_the_same_of_what_went_between_them(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded, tmp_path) as (_swarm, client):
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        tokens = aiter(stream)
        for _ in range(8):
            await anext(tokens)
        session = stream._ring._session
        asked = session.id, bytes(SEED_BYTES), len(PROMPT), client._host.swarm.id
        first, last = [await fetch_account(client.auditor.statements, hop.peer, *asked) for hop in session.route]
        assert first.received_TK is None and last.sent_TK is None
        assert first.sent_TK is not None and last.received_TK is not None
        assert torch.equal(first.sent_TK, last.received_TK)
        assert first.statement.number_format == "float32"
        await tokens.aclose()


async def come_and_go(swarm: VirtualSwarm) -> None:
    """One node after another is killed, hangs for a while or leaves; who is gone is replaced."""
    for number, (name, how) in enumerate({"a0": "kill", "b0": "hang", "a1": "leave", "b1": "kill"}.items()):
        await asyncio.sleep(1.3)
        member = swarm.members[name]
        if how == "hang":
            with member.hanging():
                await asyncio.sleep(5.0)
        elif how == "leave":
            member.leave()
        else:
            await member.kill()
        if how != "hang":
            await swarm.node(f"new{number}", "0:3" if name.startswith("a") else "3:6").wait_for("ready")


@in_virtual_time
async def test_nobody_is_accused_while_honest_peers_come_and_go(untaught: Founded, tmp_path: Path) -> None:
    """Sessions that moved, hops that went during an audit, passes of ever other sessions."""
    async with three_by_two(untaught, tmp_path) as (swarm, client):
        going = asyncio.ensure_future(come_and_go(swarm))
        moved = 0
        while not going.done():
            both = (client.generate([5 + number, 17, 7], max_new_tokens=TOKENS) for number in range(2))
            moved += sum(generation.reroutes > 0 for generation in await asyncio.gather(*both))
        await going
        await client.auditor.idle()
        found = results(client)
        assert found.keys() <= {"passed", "void"}
        assert found["passed"] >= 5
        assert moved, "the test is to be about sessions that moved"
        assert not client.auditor.standing.shunned
        assert not client.auditor.standing.doubted
