"""Reducer: replicas of the same blocks come to one gradient, or to one set of parameters.

The arithmetic is that of `compute/training/exchange.py`: rounds, in each of which the contributors' vectors are cut into parts.
Each sends its values of a part to the part's owner, who adds them up in the order of the members and sends the same bytes to
all; a listener only hears these. So everybody ends with identical numbers. Nothing that lasts is touched before the commit: an
attempt that fails is made again with other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from swarmnode.codec.body import SHARED
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import Group, How, Part, Reduce
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training import parts
from swarmnode.compute.training.exchange import Exchange, Rounds, make_exchange
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.round import Offer, Round
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.roles.training.mailbox import Mailbox
from swarmnode.swarm.run import Averaging

Blocks = tuple[int, ...]
T = TypeVar("T")


@dataclass
class Agreed:
    """What a reduction came to, by blocks. Where there is no vector, blocks keep their own accumulators."""

    sums: dict[Blocks, Tensor] = field(default_factory=dict)
    ways: dict[Blocks, Tensor] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    squares: list[float] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    def commit(self, learner: Learner, norm: float) -> None:
        """Update with it; on the bench."""
        learner.commit(self.sums, norm, summed=self.summed, apart=self.apart, ways=self.ways)
        for exchange in self.exchanges:
            exchange.accept()


@dataclass(frozen=True)
class _Sum:
    """One round of a group's sum."""

    head: Part  # of all its parts, but for their numbers
    contributors: tuple[PeerId, ...]
    weights: Mapping[PeerId, float]
    members: tuple[PeerId, ...]

    def head_of(self, part: int, *, agreed: bool) -> Part:
        """Of one part: a contribution, or the sum that counts."""
        return msgspec.structs.replace(self.head, part=part, agreed=agreed)


class Reducer:
    """One attempt at a time; `hear` takes the parts of others, which may come before our own REDUCE."""

    def __init__(self, peer: PeerId, switchboard: Switchboard, bench: Executor) -> None:
        self._peer = peer
        self._bench = bench
        self._mailbox = Mailbox(switchboard)
        self._learner: Learner | None = None
        self._exchanges: dict[tuple[Blocks, int], Exchange] = {}

    def __repr__(self) -> str:
        return f"<Reducer with {self._mailbox!r}, {len(self._exchanges)} exchanges>"

    def hear(self, channel: Channel, frame: Frame, body: Body) -> None:
        """A replica's part has come."""
        self._mailbox.hear(channel, frame, body)

    async def reduce(self, term: int, body: Reduce, learner: Learner, *, listening: bool) -> Agreed:
        """Agree with the members of each group that we are in. Raises PeerLost where one of them is lost, NotFinite."""
        self._mailbox.begin((term, body.step, body.attempt))
        if learner is not self._learner:  # another run, or another state: what was left over before is not its own
            self._learner = learner
            self._exchanges.clear()
        agreed = Agreed()
        for group in body.groups:
            blocks = tuple(block for block in group.blocks if block in learner.blocks)
            head = Part(term, body.step, body.attempt, group.number, 0, 0, False, ())
            if blocks and group.how == How.SUM:
                await self._sum_gradients(group, blocks, head, agreed, listening=listening)
            elif blocks:
                await self._update_apart(group, blocks, head, agreed, listening=listening)
            else:
                agreed.squares.append(0.0)
        return agreed

    async def _sum_gradients(
        self, group: Group, blocks: Blocks, head: Part, agreed: Agreed, *, listening: bool
    ) -> None:
        learner = self._learner
        assert learner is not None
        if len(group.members) > 1:
            local_N = await self._call(lambda: learner.gradient(blocks))
            agreed.sums[blocks] = await self._agree(group, blocks, head, local_N, agreed, listening=listening)
        agreed.summed.update(blocks)
        total_N = agreed.sums.get(blocks)
        agreed.squares.append(await self._call(lambda: learner.squared_norm(blocks, total_N)))

    async def _update_apart(self, group: Group, blocks: Blocks, head: Part, agreed: Agreed, *, listening: bool) -> None:
        learner = self._learner
        assert learner is not None
        if group.how == How.AVERAGE:
            way_N = await self._call(lambda: learner.ways(blocks))
            if len(group.members) > 1:
                weighted_N = way_N * _weights(group).get(self._peer, 0.0)
                way_N = await self._agree(group, blocks, head, weighted_N, agreed, listening=listening)
            agreed.ways[blocks] = way_N
        agreed.apart.update(blocks)
        square = 0.0 if listening else await self._call(lambda: learner.apart_squared_norm(blocks))
        agreed.squares.append(square)

    # -- one vector

    async def _agree(
        self, group: Group, blocks: Blocks, head: Part, local_N: Tensor, agreed: Agreed, *, listening: bool
    ) -> Tensor:
        """The rounds of an exchange; the sum of all contributors' vectors."""
        exchange = self._exchange(blocks, group.how)
        weights = _weights(group)
        weight = weights.get(self._peer, 0.0)
        members = tuple(member.peer for member in group.members)
        run = exchange.run(torch.zeros_like(local_N) if listening or not weight else local_N, weight)
        step = await self._call(lambda: _advance(run, None))
        number = 0
        while isinstance(step, Round):
            round_, sum_ = step, _Sum(msgspec.structs.replace(head, round=number), tuple(weights), weights, members)
            total_N = await self._sum(sum_, round_)
            step = await self._call(partial(_advance, run, total_N))
            number += 1
        agreed.exchanges.append(exchange)
        return step

    def _exchange(self, blocks: Blocks, how: int) -> Exchange:
        """The one that has what these blocks' earlier exchanges left over."""
        assert self._learner is not None
        if (blocks, how) not in self._exchanges:
            averaging = self._learner.run.averaging
            if SHARED in blocks and how == How.SUM:
                averaging = _without_means(averaging)
            self._exchanges[blocks, how] = make_exchange(averaging, self._learner.shapes(blocks))
        return self._exchanges[blocks, how]

    async def _sum(self, sum_: _Sum, round_: Round) -> Tensor:
        """A vector summed over the contributors, each of whom adds up some of its parts."""
        cuts = dict(enumerate(parts.cut(len(round_.vector_N), len(sum_.contributors))))
        owners = {number: sum_.contributors[part.owner] for number, part in cuts.items()}
        agreed: dict[int, Tensor] = {}
        if self._peer in sum_.contributors:
            for number, part in cuts.items():
                if owners[number] != self._peer:
                    offer = await self._call(partial(round_.offer, part.place))
                    await self._send(owners[number], sum_.head_of(number, agreed=False), offer)
            for number, part in cuts.items():
                if owners[number] == self._peer:
                    agreed[number] = await self._settle(sum_, round_, number, part.place)
        for number, part in cuts.items():
            if number not in agreed:
                encoded = await self._receive(owners[number], sum_.head_of(number, agreed=True))
                agreed[number] = await self._call(partial(round_.read, part.place, *encoded))
        return await self._call(lambda: torch.cat([round_.vector_N[:0], *(agreed[number] for number in cuts)]))

    async def _settle(self, sum_: _Sum, round_: Round, number: int, place: slice) -> Tensor:
        """The owner's work: add up a part, and send the same bytes to all."""
        offers: list[Offer] = []
        for peer in sum_.contributors:
            if peer == self._peer:
                encoded = await self._call(lambda: round_.offer(place))
            else:
                encoded = await self._receive(peer, sum_.head_of(number, agreed=False))
            offers.append((sum_.weights[peer], *encoded))
        settled = await self._call(lambda: round_.settle(place, offers))
        for peer in sum_.members:
            if peer != self._peer:
                await self._send(peer, sum_.head_of(number, agreed=True), settled)
        return await self._call(lambda: round_.read(place, *settled))

    def _call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return self._bench.call(Urgency.CONTROL, function)

    async def _send(self, peer: PeerId, head: Part, encoded: parts.Encoded) -> None:
        await self._mailbox.send(peer, msgspec.structs.replace(head, values=(encoded[0],)), [encoded[1]])

    async def _receive(self, peer: PeerId, head: Part) -> parts.Encoded:
        letter = await self._mailbox.receive(peer, head)
        if len(letter.head.values) != 1:
            raise ProtocolError(f"a part of {len(letter.head.values)} vectors", peer=peer)
        return letter.head.values[0], letter.payload


def _weights(group: Group) -> dict[PeerId, float]:
    """Of the contributors, in their order: their share of the microbatches."""
    total = sum(member.count for member in group.members)
    return {member.peer: member.count / total for member in group.members if member.count > 0}


def _advance(run: Rounds, total_N: Tensor | None) -> Round | Tensor:
    """The next round, or what all rounds came to."""
    try:
        return next(run) if total_N is None else run.send(total_N)
    except StopIteration as ended:
        result: Tensor = ended.value
        return result


def _without_means(averaging: Averaging) -> Averaging:
    """For what the ends share: one end's gradient adds to the other's and does not stand for it."""
    codec = Codec.FP16 if averaging.codec == Codec.TOPK else averaging.codec
    return msgspec.structs.replace(averaging, codec=codec, rank=0)
