"""All-reduce of members that do not send alike."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
import torch
from msgspec.structs import replace

from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Form, Group
from swarmnode.compute.training.averaging.parts import LARGEST_PART
from swarmnode.errors import ProtocolError
from swarmnode.net.memory.medium import Path
from swarmnode.plan.compression import LADDER
from swarmnode.plan.training.averaging import line_forms, part_shares
from swarmnode.swarm.records.run import Averaging
from swarmnode.training.averaging.all_reduce import Agreed
from tests.net.virtual import in_virtual_time
from tests.training.averaging.replicas import Replica, group_of, replicas, within


def with_forms(group: Group, forms: Mapping[str, Form]) -> Group:
    return replace(group, members=tuple(replace(one, form=forms.get(one.peer, one.form)) for one in group.members))


def accounted(results: Sequence[Agreed | BaseException], elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all agreed on, the same bytes, and what all of them still have to say."""
    left_N, sums = torch.zeros(elements), []
    for result in results:
        assert isinstance(result, Agreed), result
        sums.append(result.sums[(0,)])
        for compressor in result.gradient_compressors:
            compressor.accept()
            assert compressor.carried.residual_N is not None
            left_N += compressor.carried.residual_N
    assert all(torch.equal(sums[0], other_N) for other_N in sums[1:])
    return sums[0], left_N


@pytest.mark.parametrize("clusters", [(0, 0, 0, 0), (0, 0, 1, 1)])
@in_virtual_time
async def test_what_strong_codecs_lose_is_said_the_next_time(clusters: Sequence[int]) -> None:
    elements = 10_000
    _, members = await replicas(4, elements, averaging=Averaging(by_line=True))
    names = [member.peer for member in members]
    forms = dict(zip(names, map(Form, (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)), strict=True))
    group = with_forms(group_of(members, clusters=dict(zip(names, clusters, strict=True))), forms)
    total_N, left_N = accounted(await within(60, [member.reduce([group]) for member in members]), elements)
    wanted_N = sum(member.learner.gradient([0]).copy() for member in members)
    assert float((total_N - wanted_N).norm() / wanted_N.norm()) < 0.15
    torch.testing.assert_close(total_N + left_N, wanted_N, rtol=1e-4, atol=1e-5)


async def seconds_of(members: Sequence[Replica], shares: Sequence[int], forms: Sequence[Form]) -> float:
    began_s = asyncio.get_running_loop().time()
    names = [member.peer for member in members]
    group = group_of(list(members), shares=dict(zip(names, shares, strict=True)))
    group = with_forms(group, dict(zip(names, forms, strict=True)))
    results = await within(60, [member.reduce([group]) for member in members])
    assert all(isinstance(result, Agreed) for result in results), results
    return asyncio.get_running_loop().time() - began_s


@pytest.mark.parametrize(
    ("averaging", "bytes_per_s", "share"),
    [(Averaging(by_line=True), 4e6, 0.35), (Averaging(codec=Codec.TOPK2, keep=0.1, by_line=True), 4e5, 0.5)],
)
@in_virtual_time
async def test_a_slow_line_is_not_waited_for_longer_than_it_is_worth(
    averaging: Averaging, bytes_per_s: float, share: float
) -> None:
    """One of four has a tenth of the others' line, and adds up as much less: parts sized by lines alone do not make up for it."""
    took_s, usual, narrow = [], Path(0.01, bytes_per_s), Path(0.01, bytes_per_s / 10)
    for by_line in (False, True):
        world, (slow, *others) = await replicas(4, LARGEST_PART, averaging=averaging, path=usual)
        for other in others:
            world.set_path(slow.peer, other.peer, narrow, back=usual)
        members = [slow, *others]
        lines_bps = [9.6e6, *[96e6] * 3]
        shares = part_shares(lines_bps)
        same = [Form(averaging.codec, averaging.keep)] * 4
        forms = line_forms(lines_bps, shares, averaging, LADDER) if by_line else same
        took_s.append(await seconds_of(members, shares, forms))
    assert took_s[1] < share * took_s[0], took_s


@pytest.mark.parametrize(
    ("averaging", "form"),
    [
        (Averaging(by_line=True), Form(Codec.TOPK, 0.1)),
        (Averaging(codec=Codec.INT8, by_line=True), Form(Codec.NONE)),
        (Averaging(by_line=True, robust=True), Form(Codec.INT4)),
        (Averaging(codec=Codec.TOPK, by_line=True), Form(Codec.INT4)),
        (Averaging(by_line=True), Form(200)),
    ],
)
@in_virtual_time
async def test_what_the_run_does_not_leave_to_lines_is_refused(averaging: Averaging, form: Form) -> None:
    _, members = await replicas(3, 1000, averaging=averaging)
    forms = {member.peer: Form(averaging.codec) for member in members} | {members[0].peer: form}
    for result in await within(10, [member.reduce([with_forms(group_of(members), forms)]) for member in members]):
        assert isinstance(result, ProtocolError) and "leave to lines" in str(result)


@in_virtual_time
async def test_who_sends_in_a_codec_that_nobody_has_is_to_blame() -> None:
    """Its own word on its form differs from the others'."""
    _, members = await replicas(3, 5000, averaging=Averaging(by_line=True))
    group = group_of(members)
    false = with_forms(group, {members[0].peer: Form(Codec.INT4)})
    tasks = [members[0].reduce([false]), *(member.reduce([group]) for member in members[1:])]
    results = await within(60, tasks)
    assert {result.peer for result in results[1:]} == {members[0].peer}  # type: ignore[union-attr]
