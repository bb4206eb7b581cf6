"""Replicas of one unit that reduce, alone with one another: no stage, no coordinator, and computing at once, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from swarmnode.codec.body import VERSION, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Error, Hello
from swarmnode.codec.training_messages import USUAL_SHARE, Group, MemberSpec, Pull, Reduce
from swarmnode.compute.executor import Urgency
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment, Values
from swarmnode.errors import ErrorCode
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.memory.medium import Path
from swarmnode.net.memory.network import FakeWorld
from swarmnode.swarm.records.run import Averaging, Run
from swarmnode.training.averaging.all_reduce import Agreed, AllReducer

HELLO = Hello(VERSION, bytes(32), "test")
PROTOCOL = "/test/train/1"
T = TypeVar("T")


class VectorSegment(Segment):
    """Units of one long matrix each; nothing goes through them."""

    start = 0

    def __init__(self, elements: int, units: int = 1) -> None:
        self.end = self.units = units
        self.device = torch.device("cpu")
        self._parameters = {unit: {"weight": nn.Parameter(torch.zeros(1, elements))} for unit in range(units)}

    def parameters(self) -> Mapping[int, Mapping[str, nn.Parameter]]:
        return self._parameters

    def buffers(self) -> Mapping[int, Mapping[str, Tensor]]:
        return {}

    def forward(self, values: Values, start: int, end: int, seed: int, labels: Values = ()) -> Values:
        raise NotImplementedError


class VirtualExecutor:
    """Computes one call after another, `call_s` seconds each. `stalls_after`: after so many calls it does nothing any more."""

    def __init__(self) -> None:
        self.call_s = 0.0
        self.stalls_after: int | None = None
        self._free_at_s = 0.0

    def call(self, _urgency: Urgency, function: Callable[[], T], **_about: str) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        if self.stalls_after is not None:
            self.stalls_after = max(0, self.stalls_after - 1)
        if self.stalls_after != 0:
            self._free_at_s = max(self._free_at_s, loop.time()) + self.call_s
            loop.call_at(self._free_at_s, _compute, function, future)
        return future


def _compute(function: Callable[[], T], future: asyncio.Future[T]) -> None:
    if future.cancelled():
        return
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)


RUN_ID = bytes(range(32))


class Replica:
    """One of them, with gradients of its own."""

    def __init__(self, world: FakeWorld, elements: int, units: int, averaging: Averaging) -> None:
        self.network = world.join()
        self.peer = self.network.peer_id
        config = LinkConfig(clock=asyncio.get_running_loop().time)
        self.board = Switchboard(self.network, PROTOCOL, HELLO, config, accept=self._accept)
        self.executor: Any = VirtualExecutor()
        self.all_reducer = AllReducer(self.peer, self.board, self.executor)
        # nothing is updated, so that moments would be memory for nothing
        run = Run(data=bytes(32), steps=9, batch=8, microbatch=1, averaging=averaging, optimizer="sgd")
        self.learner = Learner(VectorSegment(elements, units), run)
        generator = torch.Generator().manual_seed(sum(self.peer.encode()))
        for unit in range(units):
            self.learner.gradient([unit]).split([elements])[0].uniform_(
                -1.7, 1.7, generator=generator
            )  # quicker than normal

    def __repr__(self) -> str:
        return f"<Replica {self.peer} {self.all_reducer!r}>"

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        if isinstance(body, Pull):
            self.all_reducer.receive(channel, body)
        else:
            channel.close(Error(ErrorCode.MALFORMED))

    def reduce(
        self, groups: Sequence[Group], attempt: int = 0, *, step: int = 0, listening: bool = False
    ) -> asyncio.Task[Agreed]:
        own = tuple(group for group in groups if any(member.peer == self.peer for member in group.members))
        work = self.all_reducer.reduce(1, Reduce(step, attempt, own, RUN_ID), self.learner, listening=listening)
        return asyncio.ensure_future(work)


async def replicas(
    count: int, elements: int, *, units: int = 1, averaging: Averaging | None = None, path: Path | None = None
) -> tuple[FakeWorld, list[Replica]]:
    """In order of their peer ids, as groups name them."""
    world = FakeWorld(seed=4)
    world.default_path = path or Path(latency_s=0.01, bytes_per_s=125e6)
    made = [Replica(world, elements, units, averaging or Averaging()) for _ in range(count)]
    for one in made:
        await one.board.start()
        assert one is made[0] or await one.network.connect(await made[0].network.addresses(), timeout_s=1)
    return world, sorted(made, key=lambda replica: replica.peer)


def group_of(
    members: Sequence[Replica],
    *,
    listening: Sequence[Replica] = (),
    number: int = 0,
    unit: int = 0,
    shares: Mapping[str, int] = MappingProxyType({}),
    clusters: Mapping[str, int] = MappingProxyType({}),
) -> Group:
    """Everybody has counted as much."""
    named = sorted((member.peer, member not in listening) for member in (*members, *listening))
    specs = (
        MemberSpec(peer, int(counts), shares.get(peer, USUAL_SHARE), clusters.get(peer, 0)) for peer, counts in named
    )
    return Group(number, (unit,), tuple(specs))


async def within(seconds: float, tasks: Sequence[asyncio.Task[Agreed]]) -> list[Agreed | BaseException]:
    """What became of all, in virtual time."""
    return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), seconds)
