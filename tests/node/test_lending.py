"""A node that yields: what runs moves elsewhere, the device is free, and the user sees the same text."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from pathlib import Path

import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.compute.executor import WorkItem
from swarmnode.ledger import Account
from swarmnode.lending.lending import Keep, LendingState
from swarmnode.net.interfaces import PeerId
from swarmnode.serving import serving_stage
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.test_faults import SPANS, TOKENS, generate_and, two_by_two
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

HAND_OVER_S = 2.0
PAUSES = 5  # of 10 s, every 20 s
LONGEST_GAP_S = 3.0


@pytest.fixture(autouse=True)
def garbage_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look through all of a test process takes longer than what is tested."""
    monkeypatch.setattr("swarmnode.compute.device.free_memory", lambda: None)


async def state_seen(client: SwarmClient, peer: PeerId, state: str) -> None:
    """Wait until the client sees the peer in this state."""
    while not any(each["peer"] == peer and each["state"] == state for each in client.status()["peers"]):
        await client.changed()


def weights_held(member: VirtualMember) -> int:
    host = member.node._host
    assert host is not None
    return host.link_config.ledger.accounts()[Account.WEIGHTS]


@pytest.mark.parametrize("keep", Keep, ids=lambda keep: keep.value)
@in_virtual_time
async def test_a_paused_node_is_free_and_comes_back(
    founded: Founded, tiny: TinyModel, tmp_path: Path, keep: Keep, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    load_span = serving_stage.load_span
    monkeypatch.setattr(
        serving_stage, "load_span", lambda *args, **more: loads.append(args[1:]) or load_span(*args, **more)
    )  # type: ignore[func-returns-value]
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        loaded, paused, now = len(loads), [], asyncio.get_running_loop().time

        async def pause(route: object) -> None:
            member = swarm.member(route[0].peer)  # type: ignore[index]
            began_s = now()
            member.node.lending.pause("a film", keep=keep)
            await member.node.lending.until(LendingState.PAUSED)
            assert now() - began_s <= HAND_OVER_S
            paused.append(member)

        result = await generate_and(client, 17, pause)
        assert result.ids == tiny.alone(PROMPT, TOKENS) and result.longest_stall_s <= 1.0
        (member,) = paused
        assert bool(weights_held(member)) is (keep is Keep.MEMORY)
        await state_seen(client, member.peer, "paused")
        again = await client.generate(PROMPT, max_new_tokens=4)
        assert again.reroutes == 0 and member.peer not in [hop.peer for hop in again.route]
        member.node.lending.resume()
        await member.node.lending.until(LendingState.RUNNING)
        await state_seen(client, member.peer, "ready")
        assert len(loads) - loaded == (1 if keep is Keep.DISK else 0)
        other = next(
            one for one in swarm.members.values() if one is not member and SPANS[one.name] == SPANS[member.name]
        )
        await other.kill()
        assert (await client.generate(PROMPT, max_new_tokens=TOKENS)).ids == tiny.alone(PROMPT, TOKENS)
        await member.stop()


@in_virtual_time
async def test_what_runs_is_finished_and_nothing_new_taken(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        finishing: list[VirtualMember] = []

        async def finish(route: object) -> None:
            member = swarm.member(route[0].peer)  # type: ignore[index]
            member.node.lending.finish("soon")
            finishing.append(member)
            await state_seen(client, member.peer, "draining")
            other = await client.generate(PROMPT, max_new_tokens=2)
            assert member.peer not in [hop.peer for hop in other.route]
            assert member.node.lending.state is LendingState.FINISHING

        result = await generate_and(client, 5, finish)
        assert result.ids == tiny.alone(PROMPT, TOKENS) and result.reroutes == 0
        lending = finishing[0].node.lending
        await lending.until(LendingState.PAUSED)
        lending.resume()
        await lending.until(LendingState.RUNNING)
        lending.finish("at once, for nothing runs")
        await lending.until(LendingState.PAUSED)


@in_virtual_time
async def test_a_node_that_is_to_leave_when_it_has_finished_ends(
    founded: Founded, tiny: TinyModel, tmp_path: Path
) -> None:
    async with two_by_two(founded, tmp_path) as (swarm, _, client):
        finishing: list[VirtualMember] = []

        async def finish(route: object) -> None:
            finishing.append(swarm.member(route[0].peer))  # type: ignore[index]
            finishing[0].node.lending.finish("a trip", leave=True)

        result = await generate_and(client, 5, finish)
        assert result.ids == tiny.alone(PROMPT, TOKENS) and result.reroutes == 0
        await finishing[0].wait_for("left")


@in_virtual_time
async def test_a_node_that_is_told_to_pause_before_its_swarm_is_there_pauses_at_once(
    founded: Founded, tmp_path: Path
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        member = swarm.node("a")
        await member.wait_for("waiting")
        lending = member.node.lending
        lending.pause("a film")
        await asyncio.wait_for(lending.settled(), 1)
        await swarm.bootstrap()
        await member.wait_for("machine")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(member.wait_for("loading"), 60)
        assert lending.state is LendingState.PAUSED
        lending.resume()
        await member.wait_for("ready")
        await member.stop()


@in_virtual_time
async def test_a_node_that_is_told_to_pause_while_it_loads_holds_nothing(founded: Founded, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        member = swarm.node("a")
        await member.wait_for("loading")
        member.node.lending.pause("a film")
        await member.node.lending.until(LendingState.PAUSED)
        assert weights_held(member) == 0
        member.node.lending.resume()
        await member.wait_for("ready")
        await member.stop()


def slow_pass_s(_item: WorkItem) -> float:
    """As a large model's, so that minutes have few tokens."""
    return 0.1


@in_virtual_time
async def test_pauses_under_load_cost_nobody_a_word(founded: Founded, tiny: TinyModel, tmp_path: Path) -> None:
    """A swarm of four under load; every 10 s one of them, each time another one, pauses or resumes."""
    async with VirtualSwarm(tmp_path) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for name, span in SPANS.items():
            swarm.node(name, span, cost_s=slow_pass_s)
        for member in swarm.members.values():
            await member.wait_for("ready")
        async with swarm.client() as client:
            calm_s = await under_load(client, tiny)
            pausing = asyncio.ensure_future(pause_in_turn(list(swarm.members.values())))
            gaps_s: list[float] = []
            while not pausing.done():
                gaps_s += await under_load(client, tiny)
            await pausing
    p99_s, calm_p99_s = statistics.quantiles(gaps_s, n=100)[98], statistics.quantiles(calm_s, n=100)[98]
    assert p99_s <= 2 * calm_p99_s and max(gaps_s) <= LONGEST_GAP_S, (p99_s, calm_p99_s, len(gaps_s), max(gaps_s))


async def pause_in_turn(members: list[VirtualMember]) -> None:
    for number, member in zip(range(PAUSES), itertools.cycle(members), strict=False):
        member.node.lending.pause("a film", keep=Keep.MEMORY if number % 2 else Keep.DISK)
        await asyncio.sleep(10)
        member.node.lending.resume()
        await asyncio.sleep(10)


async def under_load(client: SwarmClient, tiny: TinyModel) -> list[float]:
    """The gaps of two texts at once."""
    both = await asyncio.gather(gaps_of(client, tiny), gaps_of(client, tiny))
    return list(itertools.chain(*both))


async def gaps_of(client: SwarmClient, tiny: TinyModel) -> list[float]:
    """Seconds between the tokens of one text, which is the right one."""
    now = asyncio.get_running_loop().time
    stream = await client.stream(PROMPT, max_new_tokens=TOKENS)
    times_s = [now() async for _ in stream]
    assert stream.result.ids == tiny.alone(PROMPT, TOKENS)
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]
