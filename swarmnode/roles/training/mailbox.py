"""Mailbox: parts of vectors between replicas. What comes before it is asked for is kept, within bounds."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, End, Error
from swarmnode.codec.training_messages import Part
from swarmnode.errors import PeerError, PeerLost
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.switchboard import Channel, Switchboard

MAX_EARLY_BYTES = 256 << 20  # of parts that nobody has asked for yet; what is beyond is lost, and the attempt with it

Attempt = tuple[int, int, int]
"""(term, step, attempt): grows"""
Slot = tuple[Attempt, int, int, int, bool, PeerId]
"""(attempt, group, round, part, agreed, sender)"""


@dataclass(frozen=True)
class Letter:
    """A part that has come, and its payload."""

    head: Part
    payload: bytes | bytearray


class Mailbox:
    """One conversation with each replica for what is sent; theirs bring what is received."""

    def __init__(self, switchboard: Switchboard) -> None:
        self._switchboard = switchboard
        self._channels: dict[PeerId, Channel] = {}  # on which we speak
        self._watched: dict[PeerId, Channel] = {}  # silent ones, that tell when a peer is lost
        self._letters: dict[Slot, Letter] = {}
        self._letter_bytes = 0
        self._wanted: dict[Slot, asyncio.Future[Letter]] = {}
        self._oldest: Attempt = (-1, -1, -1)

    def __repr__(self) -> str:
        return f"<Mailbox with {len(self._letters)} parts, {len(self._wanted)} awaited>"

    def begin(self, attempt: Attempt) -> None:
        """Parts of earlier attempts are void, and who waits for one waits in vain."""
        self._oldest = attempt
        for slot in [slot for slot in self._letters if slot[0] < attempt]:
            self._take(slot)
        for future in self._wanted.values():
            if not future.done():
                future.set_exception(PeerLost("the reduction was begun again"))
        self._wanted.clear()

    async def send(self, peer: PeerId, head: Part, payload: list[Buffer]) -> None:
        """Raises PeerLost."""
        channel = await self._channel_to(peer, self._channels)
        channel.send(head, payload=payload)
        await channel.drain()

    async def receive(self, peer: PeerId, head: Part) -> Letter:
        """The part of these numbers from a peer. Raises PeerLost where it is lost, or the attempt is over."""
        slot = _slot(head, peer)
        if slot not in self._letters:
            await self._channel_to(peer, self._watched)  # so that its loss is noticed
        if slot in self._letters:
            return self._take(slot)
        future: asyncio.Future[Letter] = asyncio.get_running_loop().create_future()
        self._wanted[slot] = future
        try:
            return await future
        finally:
            self._wanted.pop(slot, None)

    def hear(self, channel: Channel, frame: Frame, body: Body) -> None:
        """A part has come, or the end of a replica's conversation."""
        if isinstance(body, Part):
            self._deliver(_slot(body, channel.peer), Letter(body, frame.payload))
        elif isinstance(body, End | Error):
            self._lost(channel.peer, PeerLost("a replica ended the reduction", peer=channel.peer))

    def _deliver(self, slot: Slot, letter: Letter) -> None:
        future = self._wanted.get(slot)
        if future is not None and not future.done():
            future.set_result(letter)
        elif slot[0] >= self._oldest and self._letter_bytes + len(letter.payload) <= MAX_EARLY_BYTES:
            if slot in self._letters:
                self._take(slot)
            self._letters[slot] = letter
            self._letter_bytes += len(letter.payload)

    def _take(self, slot: Slot) -> Letter:
        letter = self._letters.pop(slot)
        self._letter_bytes -= len(letter.payload)
        return letter

    async def _channel_to(self, peer: PeerId, channels: dict[PeerId, Channel]) -> Channel:
        """One to speak on is never one that has been silent: others may have begun since, and what comes under a lower number
        than theirs for the first time is taken for a conversation that is over."""
        channel = channels.get(peer)
        if channel is None or not channel.open:
            channel = channels[peer] = await self._switchboard.call(
                peer, lambda _frame, _body: None, lambda error: self._lost(peer, error)
            )
        return channel

    def _lost(self, peer: PeerId, error: PeerError) -> None:
        """Whoever waits for a part of this peer waits in vain."""
        self._channels.pop(peer, None)
        self._watched.pop(peer, None)
        for slot, future in self._wanted.items():
            if slot[-1] == peer and not future.done():
                future.set_exception(error)


def _slot(head: Part, sender: PeerId) -> Slot:
    return ((head.term, head.step, head.attempt), head.group, head.round, head.part, head.agreed, sender)
