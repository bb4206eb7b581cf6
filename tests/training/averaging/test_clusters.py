"""All-reduce over clusters: inside, then between, then back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
import torch

from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.averaging.parts import LARGEST_PART
from swarmnode.errors import PeerLost, ProtocolError
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.records.run import Averaging
from swarmnode.training.averaging.all_reduce import Agreed
from tests.net.virtual import in_virtual_time
from tests.training.averaging.replicas import Replica, group_of, replicas, within

INSIDE = Path(latency_s=0.0005, bytes_per_s=125e6)  # 1 Gbit/s
BETWEEN = Path(latency_s=0.02, bytes_per_s=6.25e6)  # 50 Mbit/s, each pair of peers
ONE_LINE = {True: Path(0.02, 6.25e6, line="there"), False: Path(0.02, 6.25e6, line="back")}  # all pairs together


def join(world: FakeWorld, sides: Sequence[Sequence[Replica]], *, one_line: bool = False) -> dict[str, int]:
    """Lay slow paths between clusters; the cluster of each member."""
    for here, side in enumerate(sides):
        for there, other in enumerate(sides):
            for one in side:
                for two in other if here < there else ():
                    between = (ONE_LINE[True], ONE_LINE[False]) if one_line else (BETWEEN, BETWEEN)
                    world.set_path(one.peer, two.peer, *between)
    return {member.peer: cluster for cluster, side in enumerate(sides) for member in side}


async def reduce_all(members: Sequence[Replica], clusters: Mapping[str, int], **group: object) -> tuple[float, list]:
    """Virtual seconds, and everybody's sums."""
    began_s = asyncio.get_running_loop().time()
    spec = group_of(list(members), clusters=clusters, **group)  # type: ignore[arg-type]
    listening = group.get("listening", ())
    everybody = [*members, *listening]  # type: ignore[misc]
    tasks = [member.reduce([spec], listening=member in listening) for member in everybody]  # type: ignore[operator]
    results = await within(600, tasks)
    assert all(isinstance(result, Agreed) for result in results), results
    return asyncio.get_running_loop().time() - began_s, [result.sums[(0,)] for result in results]  # type: ignore[union-attr]


def assert_summed(sums: Sequence[torch.Tensor], members: Sequence[Replica], **tolerance: float) -> None:
    """Everybody has the same bytes, which are the sum but for the order of additions."""
    assert all(torch.equal(sums[0], other_N) for other_N in sums[1:])
    wanted_N = sum(member.learner.gradient([0]).copy() for member in members)
    torch.testing.assert_close(sums[0], wanted_N, **tolerance)


@pytest.mark.parametrize(("one_line", "share"), [(False, 1.0), (True, 0.4)])
@in_virtual_time
async def test_two_clusters_of_four_joined_by_50_mbit_s(one_line: bool, share: float) -> None:
    """2 MiB each: 1.46 s over one line for all, 0.49 s by clusters, since a quarter crosses. Where each pair has such a line for
    itself, so little is short of nothing but delays."""
    took_s = []
    for grouped in (False, True):
        world, members = await replicas(8, 2 * LARGEST_PART, path=INSIDE)
        clusters = join(world, [members[0::2], members[1::2]], one_line=one_line)
        seconds, sums = await reduce_all(members, clusters if grouped else {})
        assert_summed(sums, members)
        took_s.append(seconds)
    assert took_s[1] < share * took_s[0], took_s


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (2, 1, 1), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("elements", [1, 70, 3 * 4096 + 5, LARGEST_PART + 64])
@in_virtual_time
async def test_any_clusters_and_lengths(sizes: Sequence[int], elements: int) -> None:
    world, members = await replicas(sum(sizes), elements, path=INSIDE)
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    clusters = join(world, [members[start : start + size] for start, size in zip(starts, sizes, strict=True)])
    shares = {member.peer: 1 + 7 * number for number, member in enumerate(members)}
    _, sums = await reduce_all(members, clusters, shares=shares)
    assert_summed(sums, members)


@pytest.mark.parametrize("averaging", [Averaging(codec=Codec.INT4), Averaging(codec=Codec.TOPK2), Averaging(rank=2)])
@in_virtual_time
async def test_what_codecs_lose_on_the_way_is_on_somebodys_account(averaging: Averaging) -> None:
    """Sums and what is left over add up to what all wanted to say, however often it was encoded."""
    world, members = await replicas(4, 9000, path=INSIDE, averaging=averaging)
    clusters = join(world, [members[:2], members[2:]])
    spec = group_of(members, clusters=clusters)
    results = await within(60, [member.reduce([spec]) for member in members])
    total_N = torch.zeros(9000)
    for result in results:
        assert isinstance(result, Agreed) and torch.equal(result.sums[(0,)], results[0].sums[(0,)])  # type: ignore[union-attr]
        for compressor in result.gradient_compressors:
            compressor.accept()
            assert compressor.carried.residual_N is not None
            total_N += compressor.carried.residual_N / (0.95 if averaging.codec == Codec.TOPK2 else 1.0)
    wanted_N = sum(member.learner.gradient([0]).copy() for member in members)
    torch.testing.assert_close(results[0].sums[(0,)] + total_N, wanted_N, rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]


@in_virtual_time
async def test_a_listener_hears_the_sum_from_its_own_cluster() -> None:
    world, (listener, *members) = await replicas(5, 20_000, path=INSIDE)
    clusters = join(world, [members[:2], [*members[2:], listener]])
    _, sums = await reduce_all(members, clusters, listening=[listener])
    assert len(sums) == 5
    assert_summed(sums, members)


@in_virtual_time
async def test_computing_may_be_slower_than_any_line() -> None:
    world, members = await replicas(6, 3 * LARGEST_PART, path=INSIDE)
    for number, member in enumerate(members):
        member.executor.call_s = 0.002 * (1 + number)
    _, sums = await reduce_all(members, join(world, [members[:3], members[3:]]))
    assert_summed(sums, members)


@in_virtual_time
async def test_who_hangs_is_named_by_all_whatever_cluster_they_are_in() -> None:
    world, members = await replicas(6, 4 * LARGEST_PART, path=INSIDE)
    clusters = join(world, [members[:3], members[3:]])
    spec = group_of(members, clusters=clusters)
    tasks = [member.reduce([spec]) for member in members[1:]]
    tasks.append(members[0].reduce([spec]))
    await asyncio.sleep(0.02)
    world.hang(members[0].peer)
    results = await within(300, tasks[:-1])
    tasks[-1].cancel()
    assert all(isinstance(result, PeerLost) for result in results)
    assert members[0].peer in {result.peer for result in results}  # type: ignore[union-attr]
    assert {result.peer for result in results} <= {members[0].peer, None}  # type: ignore[union-attr]


@pytest.mark.parametrize("averaging", [Averaging(robust=True), Averaging(codec=Codec.TOPK)])
@in_virtual_time
async def test_where_each_contribution_has_to_be_seen_clusters_are_refused(averaging: Averaging) -> None:
    _, members = await replicas(4, 1000, averaging=averaging)
    spec = group_of(members, clusters={members[0].peer: 1, members[1].peer: 1})
    for result in await within(10, [member.reduce([spec]) for member in members]):
        assert isinstance(result, ProtocolError) and "clusters" in str(result)
