"""Reducer: replicas of the same blocks come to one gradient.

The vector is cut into a part per contributor. Each sends its parts to their owners, who add them up in the order of the
members and send the same bytes to all; a listener only hears these. So everybody ends with identical numbers. Accumulators
are not touched: an attempt that fails is made again with other members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import Tensor

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import Group, Part, Reduce
from swarmnode.compute.training.parts import cut, reduce_part
from swarmnode.errors import PeerError, PeerLost, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.switchboard import Channel, Switchboard
from swarmnode.roles.training.bench import Bench, Urgency
from swarmnode.roles.training.values import decode_values, encode_values

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
        self._device: torch.device = torch.device("cpu")

    def __repr__(self) -> str:
        return f"<Reducer at {self._newest}, {len(self._parts)} parts waiting>"

    async def reduce(self, term: int, body: Reduce, learner: Learner, *, listening: bool) -> Agreed:
        """Agree with the members of each group that we are in. Raises PeerLost where one of them is lost, NotFinite."""
        self._begin(term, (body.step, body.attempt))
        self._device = learner.segment.device
        sums: dict[Blocks, Tensor] = {}
        squares: list[float] = []
        for group in body.groups:
            blocks = tuple(block for block in group.blocks if block in learner.blocks)
            if len(group.members) > 1 and blocks:
                local_N = await self._bench.call(Urgency.CONTROL, partial(learner.gradient, blocks))
                sums[blocks] = await self._sum(body, group, torch.zeros_like(local_N) if listening else local_N)
            total = sums.get(blocks)
            squares.append(await self._bench.call(Urgency.CONTROL, partial(learner.squared_norm, blocks, total)))
        return Agreed(sums, tuple(squares))

    def _begin(self, term: int, attempt: tuple[int, int]) -> None:
        for slot in [
            slot for slot, part in self._parts.items() if (part.term, part.step, part.attempt) < (term, *attempt)
        ]:
            del self._parts[slot], self._payloads[slot]
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

    async def _sum(self, body: Reduce, group: Group, local_N: Tensor) -> Tensor:
        """A vector summed over the contributors, who each add up a part of it."""
        contributors = [member.peer for member in group.members if member.count > 0]
        slices = cut(len(local_N), len(contributors))
        own = contributors.index(self._peer) if self._peer in contributors else None
        if own is not None:
            for place, peer in enumerate(contributors):
                if place != own:
                    await self._send(peer, self._head(body, group, place, False), local_N[slices[place]])
            pieces = [
                local_N[slices[own]]
                if peer == self._peer
                else await self._receive(peer, self._head(body, group, own, False), slices[own])
                for peer in contributors
            ]
            agreed_N = await self._bench.call(Urgency.CONTROL, lambda: reduce_part(pieces))
            for member in group.members:
                if member.peer != self._peer:
                    await self._send(member.peer, self._head(body, group, own, True), agreed_N)
        parts = [
            agreed_N if place == own else await self._receive(peer, self._head(body, group, place, True), slices[place])
            for place, peer in enumerate(contributors)
        ]
        return await self._bench.call(Urgency.CONTROL, lambda: torch.cat(parts))

    def _head(self, body: Reduce, group: Group, part: int, agreed: bool) -> Part:
        return Part(self._term, body.step, body.attempt, group.number, 0, part, agreed, ())

    async def _send(self, peer: PeerId, head: Part, part_N: Tensor) -> None:
        infos, payload = await self._bench.call(Urgency.CONTROL, lambda: encode_values((part_N,)))
        channel = await self._channel_to(peer)
        channel.send(msgspec.structs.replace(head, values=infos), payload=payload)
        await channel.drain()

    async def _receive(self, peer: PeerId, head: Part, place: slice) -> Tensor:
        slot = (head.attempt, head.group, head.round, head.part, head.agreed, peer)
        if slot not in self._parts:
            await self._channel_to(peer)  # so that its loss is noticed
        if slot not in self._parts:  # nor has it come meanwhile
            future = self._wanted[slot] = asyncio.get_running_loop().create_future()
            await future
        part, payload = self._parts.pop(slot), self._payloads.pop(slot)
        device = self._device
        (part_N,) = await self._bench.call(Urgency.CONTROL, lambda: decode_values(part.values, payload, device))
        if part_N.dim() != 1 or len(part_N) != place.stop - place.start:
            raise ProtocolError("a part of another length than agreed", peer=peer)
        return part_N

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
        if len(self._parts) >= MAX_EARLY_PARTS or (body.term, body.step) < (self._term, self._newest[0]):
            return
        self._parts[slot], self._payloads[slot] = body, frame.payload
        future = self._wanted.get(slot)
        if future is not None and not future.done():
            future.set_result(None)
