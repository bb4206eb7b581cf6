"""Reducer: replicas of the same blocks come to one gradient.

The vector is cut into a part per contributor. Each sends its parts to their owners, who add them up in the order of the
members and send the same bytes to all; a listener only hears these. So everybody ends with identical numbers. Accumulators
are not touched: an attempt that fails is made again with other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import Group, MemberSpec, Part, Reduce
from swarmnode.compute.training.exchange import Exchange, Round
from swarmnode.compute.training.parts import cut, decode_part, encode_part, reduce_part
from swarmnode.errors import PeerError, PeerLost, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.roles.training.bench import Bench, Urgency

if TYPE_CHECKING:
    from swarmnode.compute.training.learner import Learner

MAX_EARLY_PARTS = 256
Blocks = tuple[int, ...]
Slot = tuple[int, int, int, int, bool, PeerId]
"""(attempt, group, round, part, agreed, sender)"""


@dataclass(frozen=True)
class Agreed:
    """What a reduction came to, by blocks. A group of one keeps its own accumulators: no vector."""

    sums: Mapping[Blocks, Tensor]
    squares: tuple[float, ...]
    exchanges: tuple[Exchange, ...] = ()

    def accept(self) -> None:
        """The step is committed: what compression left out is carried over to the next."""
        for exchange in self.exchanges:
            exchange.accept()


class Reducer:
    """One attempt at a time; `hear` takes the parts of others, which may come before our own REDUCE."""

    def __init__(self, peer: PeerId, switchboard: Switchboard, bench: Bench) -> None:
        self._peer = peer
        self._switchboard = switchboard
        self._bench = bench
        self._channels: dict[PeerId, Channel] = {}
        self._parts: dict[Slot, Part] = {}
        self._payloads: dict[Slot, bytes | bytearray] = {}
        self._wanted: dict[Slot, asyncio.Future[None]] = {}
        self._newest = (-1, -1)  # (step, attempt)
        self._term = 0

    def __repr__(self) -> str:
        return f"<Reducer at {self._newest}, {len(self._parts)} parts waiting>"

    async def reduce(
        self, term: int, body: Reduce, learner: Learner, exchanges: Mapping[Blocks, Exchange], *, listening: bool
    ) -> Agreed:
        """Agree with the members of each group that we are in. Raises PeerLost where one of them is lost."""
        self._begin(term, (body.step, body.attempt))
        sums: dict[Blocks, Tensor] = {}
        squares: list[float] = []
        used: list[Exchange] = []
        for number, group in enumerate(body.groups):
            alone = len(group.members) == 1
            if all(member.peer != self._peer for member in group.members):
                squares.append(0.0)
                continue
            if not alone:
                exchange = exchanges[group.blocks]
                sums[group.blocks] = await self._exchange(body, number, group, learner, exchange, listening)
                used.append(exchange)
            total = sums.get(group.blocks)
            squares.append(
                await self._bench.call(
                    Urgency.CONTROL, lambda blocks=group.blocks, total=total: learner.squared_norm(blocks, total)
                )
            )
        return Agreed(sums, tuple(squares), tuple(used))

    def _begin(self, term: int, attempt: tuple[int, int]) -> None:
        if term != self._term:
            self._parts.clear()
            self._payloads.clear()
        self._term, self._newest = term, attempt
        for future in self._wanted.values():
            if not future.done():
                future.set_exception(PeerLost("the reduction was begun again"))
        self._wanted.clear()

    def forget(self) -> None:
        """Between steps: what is left of earlier attempts."""
        step = self._newest[0]
        for slot in [slot for slot, part in self._parts.items() if part.step <= step]:
            del self._parts[slot], self._payloads[slot]

    # -- one group

    async def _exchange(
        self, body: Reduce, number: int, group: Group, learner: Learner, exchange: Exchange, listening: bool
    ) -> Tensor:
        """Drive the exchange's rounds over the links."""
        local_N = await self._bench.call(Urgency.CONTROL, lambda: learner.gradient(group.blocks))
        if listening:
            local_N = torch.zeros_like(local_N)
        rounds = exchange.run(local_N)
        count = 0
        try:
            round_ = await self._bench.call(Urgency.CONTROL, lambda: next(rounds))
            while True:
                total_N = await self._sum(body, number, group, count, round_)
                count += 1
                round_ = await self._bench.call(Urgency.CONTROL, lambda total_N=total_N: _send(rounds, total_N))
        except _Finished as finished:
            return finished.result

    async def _sum(self, body: Reduce, number: int, group: Group, count: int, round_: Round) -> Tensor:
        """One vector summed over the contributors."""
        contributors = [member for member in group.members if member.count > 0]
        weight = sum(member.count for member in contributors)
        slices = cut(len(round_.vector_N), len(contributors))
        own = next((place for place, member in enumerate(contributors) if member.peer == self._peer), None)
        others = [member.peer for member in group.members if member.peer != self._peer]

        def head(part: int, agreed: bool) -> Part:
            return Part(self._term, body.step, body.attempt, number, count, part, agreed, ())

        if own is not None:
            for place, member in enumerate(contributors):
                if place != own:
                    await self._send(member.peer, head(place, False), round_, round_.vector_N[slices[place]])
            agreed = await self._reduce_own(head(own, False), round_, slices[own], contributors, weight)
            for peer in others:
                await self._send_encoded(peer, head(own, True), agreed)
        pieces: list[Tensor] = []
        for place, member in enumerate(contributors):
            if place == own:
                infos, payload = agreed
                piece = await self._bench.call(
                    Urgency.CONTROL, lambda i=infos, p=payload: decode_part(i, p, round_.vector_N.device)[0]
                )
            else:
                piece = (await self._receive(member.peer, head(place, True), round_))[0]
            if len(piece) != slices[place].stop - slices[place].start:
                raise ProtocolError("a part of another length than agreed", peer=member.peer)
            pieces.append(piece)
        return await self._bench.call(Urgency.CONTROL, lambda: torch.cat(pieces))

    # -- parts on the links

    async def _channel_to(self, peer: PeerId) -> Channel:
        channel = self._channels.get(peer)
        if channel is None or not channel.open:
            channel = self._channels[peer] = await self._switchboard.call(
                peer, lambda _frame, _body: None, lambda error: self._lost(peer, error)
            )
        return channel

    def _lost(self, peer: PeerId, error: PeerError) -> None:
        """Whoever waits for a part of this peer waits in vain."""
        self._channels.pop(peer, None)
        for slot, future in self._wanted.items():
            if slot[-1] == peer and not future.done():
                future.set_exception(error)

    def hear(self, channel: Channel, frame: Frame, body: Body) -> None:
        """A part has come, perhaps before our own REDUCE. Only those of the newest steps are kept."""
        if not isinstance(body, Part):
            if isinstance(body, End | Error):
                self._lost(channel.peer, PeerLost("a replica ended the reduction", peer=channel.peer))
            return
        slot = (body.attempt, body.group, body.round, body.part, body.agreed, channel.peer)
        if len(self._parts) >= MAX_EARLY_PARTS or body.step < self._newest[0]:
            return
        self._parts[slot], self._payloads[slot] = body, frame.payload
        future = self._wanted.get(slot)
        if future is not None and not future.done():
            future.set_result(None)
