"""What a neighbour sends wrong names the neighbour, whichever frame it is and wherever the honest hop stands in the route."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.messages import Fault
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.codec.tuning_messages import JoinAdapter, TuneGradient, TuneInput, TuneLabels, Updated
from swarmnode.compress.codecs import encode_values
from tests.net.virtual import in_virtual_time
from tests.training.scene import Talk
from tests.tuning.hops import IDS, Hops, hops_of

Sent = tuple[tuple[TensorInfo, ...], list[object]]
OWNER, LIAR = 0, 1
HIDDEN = 0.1 * torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(1))


def sent(*values: torch.Tensor, codec: Codec = Codec.NONE) -> Sent:
    infos, payload = encode_values(tuple(value.contiguous() for value in values), codec, topk_share=0.1)
    return tuple(infos), list(payload)


def resized(hidden: torch.Tensor, factor: float) -> Sent:
    infos, (payload,) = sent(hidden)
    raw = bytes(memoryview(payload).cast("B"))
    return infos, [(raw * 2)[: int(len(raw) * factor)]]


def named(hidden: torch.Tensor, **changes: object) -> Sent:
    (info,), payload = sent(hidden)
    return (msgspec.structs.replace(info, **changes),), payload


LIES: dict[str, Callable[[torch.Tensor], Sent]] = {
    "half the payload": lambda x: resized(x, 0.5),
    "twice the payload": lambda x: resized(x, 2),
    "no payload": lambda x: resized(x, 0),
    "a payload of one byte less": lambda x: resized(x, 1 - 1 / (4 * x.numel())),
    "a sparse codec": lambda x: sent(x, codec=Codec.TOPK),
    "a codec that the adapter does not have": lambda x: sent(x, codec=Codec.INT8),
    "integers": lambda x: sent(x.to(torch.int64)),
    "another name for its dtype": lambda x: named(x, dtype=int(DType.FLOAT16)),
    "one row less": lambda x: sent(x[:1]),
    "one position less": lambda x: sent(x[:, :-1]),
    "half the width": lambda x: sent(x[..., :32]),
    "no width": lambda x: sent(x[..., 0]),
    "no tensor": lambda x: sent(),
    "a tensor more": lambda x: sent(x, x),
    "two tensors more": lambda x: sent(x, x, x),
    "NaN": lambda x: sent(x * torch.nan),
    "infinity": lambda x: sent(x / 0),
    "one infinity": lambda x: sent(x.index_fill(2, torch.tensor(3), -torch.inf)),
    "1e30": lambda x: sent(x.sign() * 1e30),
    "one 3e38": lambda x: sent(torch.cat([x.flatten()[:-1], torch.tensor([3e38])]).view_as(x)),
    "an empty tensor": lambda x: sent(x[:0]),
}


UNKNOWN_WITHOUT_LABELS = ("one row less", "one position less")


async def fault_of(scene: Hops, place: int, feed: Callable[[Talk], object]) -> Fault:
    """The FAULT of the honest hop, which is at `place` of three hops, to its owner. `feed` feeds its adapter."""
    peers = [scene.others[LIAR], scene.others[LIAR + 1]]
    peers.insert(place, scene.peers[0])
    route = [HopSpec(peer, *units) for peer, units in zip(peers, ((0, 1), (1, 2), (2, 4)), strict=True)]
    request = msgspec.structs.replace(scene.opening([peers[0]], bytes(16)), route=tuple(route), index=place)
    owner = await Talk.begin(scene.boards[OWNER], scene.peers[0])
    await owner.ask(request)
    feed(owner)
    answer = await owner.next()
    assert isinstance(answer, Fault), answer
    return answer


@pytest.mark.parametrize("place", [1, 2])
@in_virtual_time
async def test_a_microbatch_that_does_not_fit_names_the_hop_before(tmp_path: Path, place: int) -> None:
    async with hops_of(tmp_path, hops=1, others=3) as scene:
        for name, lie in LIES.items():
            if place == 1 and name in UNKNOWN_WITHOUT_LABELS:
                continue
            talk = await Talk.begin(scene.boards[LIAR + place - 1], scene.peers[0])

            def feed(owner: Talk, talk: Talk = talk, lie: Callable[[torch.Tensor], Sent] = lie) -> None:
                labels, payload = encode_values((IDS,))
                if place == 2:
                    owner.send(TuneLabels(0, 0, labels, 1 / 14), payload)
                talk.send(JoinAdapter(bytes(16), 1, scene.others[OWNER]))
                infos, values = lie(HIDDEN)
                talk.send(TuneInput(0, 0, infos), values)

            fault = await fault_of(scene, place, feed)
            assert fault.index == place - 1, f"{name}: {fault}"


@pytest.mark.parametrize("place", [0, 1])
@in_virtual_time
async def test_gradients_that_do_not_fit_name_the_hop_behind(tmp_path: Path, place: int) -> None:
    async with hops_of(tmp_path, hops=1, others=3) as scene:
        for name, lie in LIES.items():

            def feed(owner: Talk, previous: Talk) -> None:
                infos, values = encode_values((IDS,) if place == 0 else (HIDDEN,))
                if place == 0:
                    owner.send(TuneInput(0, 0, infos), values)
                else:
                    previous.send(JoinAdapter(bytes(16), 1, scene.others[OWNER]))
                    previous.send(TuneInput(0, 0, infos), values)

            previous = await Talk.begin(scene.boards[LIAR], scene.peers[0])
            answering = asyncio.ensure_future(fault_of(scene, place, partial(feed, previous=previous)))
            channel, body = await scene.calls.get()
            while not isinstance(body, TuneInput):
                channel, body = await scene.calls.get()
            infos, values = lie(HIDDEN)
            channel.send(TuneGradient(0, 0, tuple(True for _ in infos), infos), payload=values)
            fault = await answering
            assert fault.index == place + 1, f"{name}: {fault}"


@pytest.mark.parametrize("body", [TuneGradient(0, 7, (), ()), Updated(3), TuneInput(9, 0, ())])
@in_virtual_time
async def test_other_frames_of_a_neighbour_name_it(tmp_path: Path, body: Body) -> None:
    async with hops_of(tmp_path, hops=1, others=3) as scene:
        talk = await Talk.begin(scene.boards[LIAR], scene.peers[0])

        def feed(talk: Talk, _owner: Talk) -> None:
            talk.send(JoinAdapter(bytes(16), 1, scene.others[OWNER]))
            talk.send(body)

        assert (await fault_of(scene, 1, partial(feed, talk))).index == 0
