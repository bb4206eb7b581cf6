"""Clients that have answers computed once more: who computes falsely is found and left out, who does not is trusted more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from swarmnode.audits.audit_case import fetch_account
from swarmnode.audits.auditor import PROMPT_TOKENS
from swarmnode.client.swarm_client import SwarmClient
from swarmnode.codec.audit_messages import SEED_BYTES
from swarmnode.demo import write_untaught
from swarmnode.net.interfaces import PeerId
from swarmnode.tolerances import TRIALS
from tests.net.virtual import in_virtual_time
from tests.node.audited_swarm import (
    ALWAYS,
    TOKENS,
    Change,
    a_little_off,
    generate_until_shunned,
    hop_in_use,
    noise_on_every_tenth,
    results,
    swapped,
    tamper,
    three_by_two,
    zeroed,
)
from tests.node.conftest import Founded
from tests.tiny import PROMPT, TinyModel


@pytest.fixture(scope="module")
def untaught(tmp_path_factory: pytest.TempPathFactory) -> Founded:
    """A swarm with a model as the demo has, whose honest replicas lie three times as far apart as the table of tolerances says."""
    folder = tmp_path_factory.mktemp("untaught")
    write_untaught(folder / "model", layers=4)
    return Founded.on(folder / "model", folder)


@in_virtual_time
async def test_honest_peers_pass_and_are_trusted(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded.into, tmp_path) as (_swarm, client):
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        async for _ in stream:
            pass
        await client.auditor.idle()
        assert results(client) == {"passed": 1}
        assert not client.auditor.standing.shunned
        assert all(client.auditor.standing.trust(hop.peer) > 0 for hop in stream.result.route)


@in_virtual_time
async def test_who_perturbs_one_step_in_ten_is_left_out(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded.into, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        tamper(liar, noise_on_every_tenth(5e-5))
        await generate_until_shunned(client, 12)
        assert client.auditor.standing.shunned == {liar.peer}
        after = await client.generate(PROMPT, max_new_tokens=4)
        assert liar.peer not in {hop.peer for hop in after.route}


@in_virtual_time
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "lie", [zeroed(-1, -2), zeroed(0), swapped], ids=["last two zeroed", "first zeroed", "swapped"]
)
async def test_one_false_position_of_a_prompt_is_enough(
    founded: Founded, tmp_path: Path, lie: Change, dtype: str
) -> None:
    """These passed for noise, and the hop behind, which made of them what follows from them, was shunned."""
    async with three_by_two(founded.into, tmp_path, dtype=dtype) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        tamper(liar, lie)
        assert await generate_until_shunned(client, 3) <= 3
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_near_misses_lower_trust_and_add_up(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded.into, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 0)
        for _ in range(2):
            await client.generate(PROMPT, max_new_tokens=TOKENS)
            await client.auditor.idle()
        trusted = client.auditor.standing.trust(liar.peer)
        assert trusted > 0
        tamper(liar, a_little_off(5e-5))
        await client.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")  # steps with guesses would be changed, too
        await client.auditor.idle()
        assert client.auditor.standing.trust(liar.peer) < trusted
        assert not client.auditor.standing.shunned
        await generate_until_shunned(client, 60)
        assert client.auditor.standing.shunned == {liar.peer}


@in_virtual_time
async def test_a_last_hop_that_draws_from_other_logits_is_left_out(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded.into, tmp_path) as (swarm, client):
        liar = await hop_in_use(swarm, client, 1)
        tamper(liar, lambda logits_BTV: logits_BTV.flip(-1))
        await generate_until_shunned(client, 12)
        assert client.auditor.standing.shunned == {liar.peer}


def another_temperature(logits_BTV: torch.Tensor) -> torch.Tensor:
    return 8 * logits_BTV


@pytest.mark.parametrize("change", [None, lambda logits_BTV: logits_BTV.flip(-1), another_temperature])
@in_virtual_time
async def test_draws_from_a_flat_distribution_are_right_if_rounding_explains_them(
    tmp_path: Path, change: Change | None
) -> None:
    """In bfloat16 at temperature 1, steps and chunks draw other tokens in a third of the places, and more."""
    model = TinyModel.save(tmp_path / "model").folder
    async with three_by_two(lambda swarm: swarm.create(model), tmp_path, dtype="bfloat16") as (swarm, client):
        liar = await hop_in_use(swarm, client, 1)
        if change is not None:
            tamper(liar, change)
        standing, session = client.auditor.standing, 0
        while session < 8 and not standing.shunned:
            session += 1
            prompt = [(7 * session + 13 * at) % 512 for at in range(8)]
            await client.generate(prompt, max_new_tokens=TOKENS, drafts="off", temperature=1.0, seed=session)
            await client.auditor.idle()
        assert standing.shunned == ({liar.peer} if change else set())
        assert not change or not standing.doubted


@in_virtual_time
async def test_neighbours_state_the_same_of_what_went_between_them(founded: Founded, tmp_path: Path) -> None:
    async with three_by_two(founded.into, tmp_path) as (_swarm, client):
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
        tokens = aiter(stream)
        for _ in range(8):
            await anext(tokens)
        session = stream._ring.session
        asked = session.id, bytes(SEED_BYTES), len(PROMPT), client._host.swarm.id
        first, last = [
            await fetch_account(client.auditor.replays.statements, hop.peer, *asked) for hop in session.route
        ]
        assert first.received_TK is None and last.sent_TK is None
        assert first.sent_TK is not None and last.received_TK is not None
        assert torch.equal(first.sent_TK, last.received_TK)
        assert first.statement.number_format == "float32"
        assert last.statement.sent.base == len(PROMPT) < last.statement.sent.length, "the tokens that it told"
        await tokens.aclose()


async def generate_while(client: SwarmClient, at: int, strike: Callable[[PeerId], Awaitable[None]]) -> bool:
    """Generate twice at once; at token number `at` of one of them its first hop is struck. Whether that one moved."""
    beside = asyncio.ensure_future(client.generate([1, 2, 3], max_new_tokens=TOKENS))
    stream = await client.stream([5, 17, 7, 31], max_new_tokens=TOKENS)
    async for _ in stream:
        if len(stream.result.ids) == at:
            await strike(stream.result.route[0].peer)
    await beside
    await client.auditor.idle()
    return stream.result.reroutes > 0


@in_virtual_time
async def test_nobody_is_accused_while_honest_peers_go(untaught: Founded, tmp_path: Path) -> None:
    """Sessions that moved, also in the moment in which their audit begins, in passes with others."""
    async with three_by_two(untaught.into, tmp_path, last=2) as (swarm, client):

        async def kill(peer: PeerId) -> None:
            await swarm.member(peer).kill()

        async def leave(peer: PeerId) -> None:
            swarm.member(peer).leave()

        assert await generate_while(client, 17, kill)
        await generate_while(client, TOKENS - 1, leave)
        found = results(client)
        assert found.keys() <= {"passed", "void"}
        assert found["passed"] >= 2
        assert not client.auditor.standing.shunned
        assert not client.auditor.standing.doubted


@in_virtual_time
async def test_reports_are_tried_before_they_are_believed(founded: Founded, tmp_path: Path) -> None:
    async with (
        three_by_two(founded.into, tmp_path, last=1) as (swarm, finder),
        swarm.client(audit_share=ALWAYS) as reader,
    ):
        liar = await hop_in_use(swarm, finder, 0)
        tamper(liar, noise_on_every_tenth(5e-5))
        await generate_until_shunned(finder, 12)
        await finder.reports.wait_published()
        await reader.reports.check_reports()
        assert reader.auditor.standing.shunned == {liar.peer}
        assert not reader.auditor.standing.doubted

        stream = await finder.stream(PROMPT, max_new_tokens=TOKENS)  # and now it tells of honest peers
        tokens = aiter(stream)
        ids = [*range(PROMPT_TOKENS), *[(await anext(tokens)).id for _ in range(8)]]
        session = stream._ring.session
        asked = session.id, bytes(SEED_BYTES), len(PROMPT), finder._host.swarm.id
        for hop in session.route:
            await finder.reports._publish(ids, await fetch_account(finder.auditor.replays.statements, hop.peer, *asked))
        await tokens.aclose()
        for _ in session.route:
            await reader.reports.check_reports()
        assert results(reader)["passed"] == TRIALS, "the second report was not looked into"
        assert reader.auditor.standing.doubted == {finder.peer_id}
        assert reader.auditor.standing.shunned == {liar.peer}
