"""Leader of the trainers of one adapter, and one of them: admits the others by its ticket, and averages with them.

A follower that hangs, dies or is slow is left out of a round after a deadline. It gets the leader's state before the next round,
and takes part again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from swarmnode.codec.body import SESSION_ID_BYTES, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import COTUNE_PROTOCOL, GetAdapter, JoinTuning, SharePiece, TuningJoined
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.errors import Busy, ErrorCode, PeerError, ProtocolError
from swarmnode.ledger import Account, Reservation
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.addressing.addresses import is_relayed_group, is_wide
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.peer.questions import LocalPeer
from swarmnode.swarm.records.run import encode_run
from swarmnode.tuning.adapter_parts import encode_recipe, pieces_of
from swarmnode.tuning.client.adapter_averaging import (
    SharedRun,
    TrainerPart,
    VectorEncoder,
    VectorLayout,
    mean_of,
    patient,
    share_pieces,
)
from swarmnode.tuning.client.follower import TICKET_S
from swarmnode.tuning.client.state_shapes import AdapterState

MAX_FOLLOWERS = 15
FLOOR_S, SLACK, MOST_WAITS = 20.0, 3.0, 10.0
"""Shortest patience with a silent follower (seconds); patience relative to the time since the last round; and the longest wait of a
round for followers that do send something, relative to the patience"""
MISSES = 3  # rounds in a row that a follower may miss
CLOSING_S = 30.0  # for the last messages to leave

log = logging.getLogger(__name__)


class _Place(Enum):
    JOINED = 0  # has the settings, and reads its data
    WAITS = 1  # for the leader's state
    TRAINS = 2  # takes part in the present round
    LATE = 3  # missed a round, and still has a part of it to send


@dataclass(eq=False)
class _Follower:
    channel: Channel
    memory: Reservation
    place: _Place = _Place.JOINED
    coming: bytearray = field(default_factory=bytearray)
    part: TrainerPart | None = None  # of the present round
    moved_s: float = 0.0  # when something was last received, or had been sent
    misses: int = 0
    sending: asyncio.Task[None] | None = None

    @property
    def is_missing(self) -> bool:
        return self.place is _Place.TRAINS and self.part is None


class TuningLeader:
    """Leader of an adapter's trainers; see `Partners`. `start` opens it to followers, `close` ends their tuning.

    It begins once `trainers`, itself included, are there. `on_change` is called with their number after each change.
    """

    def __init__(
        self,
        peer: LocalPeer,
        recipe: AdapterRecipe,
        averaging: SharedRun,
        layout: VectorLayout,
        *,
        trainers: int = 1,
        on_change: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self.averaging, self.layout = averaging, layout
        self.adapter, self.secret = (secrets.token_bytes(SESSION_ID_BYTES) for _ in range(2))
        run = encode_run(averaging.run)
        self._joined = TuningJoined(encode_recipe(recipe), run, averaging.every, averaging.codec)
        self._norm = 0.0  # of the leader's own part in the last round in which it had labels
        self._wanted = trainers
        self._on_change = on_change
        self._encoder = VectorEncoder(layout, averaging.codec)
        self._size = layout.size_bytes(averaging.codec)
        self._followers: dict[Channel, _Follower] = {}
        self._ended_step = -1  # of the last round
        self._ended_s = 0.0  # when it ended; 0 before a follower takes part
        self._reported_trainers = 1  # trainers
        self._changed = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._closes_s = self._clock() + TICKET_S
        self._tasks = Tasks("leader of a tuning", on_crash=peer.link_config.supervisor.ends_conversation)
        links = patient(peer.link_config)
        self._board = Switchboard(peer.network, COTUNE_PROTOCOL, peer.hello, links, accept=self._accept)

    @property
    def trainers(self) -> int:
        """Number of trainers that take part or wait to do so, this one included."""
        return 1 + sum(one.place is not _Place.JOINED for one in self._followers.values())

    async def start(self) -> None:
        """Admit followers from now on."""
        await self._board.start()

    async def close(self) -> None:
        """End the tuning of all followers in order, after what they are still being sent."""
        sending = [one.sending for one in self._followers.values() if one.sending is not None]
        if sending:
            _, late = await asyncio.wait(sending, timeout=CLOSING_S)
            await cancel_and_wait(*late)
        for one in list(self._followers.values()):
            self._drop(one)
        await self._tasks.close()
        await self._board.close()

    # -- as a partner

    async def begin(self, stop: asyncio.Event) -> None:
        """Wait until all wanted trainers are there, or `stop` is set."""
        stopped = asyncio.ensure_future(stop.wait())
        try:
            while self.trainers < self._wanted and not stopped.done():
                await self._wait_for_change(None, stopped)
        finally:
            await cancel_and_wait(stopped)

    @property
    def wants_state(self) -> bool:
        """Whether a follower waits for the leader's state."""
        return any(one.place is _Place.WAITS for one in self._followers.values())

    def give(self, state: AdapterState) -> None:
        """Send a state to the followers that wait for it: they take part from its step on."""
        pieces = [
            piece
            for unit, raw in sorted(state.layers.items())
            for piece in pieces_of(state.step, unit, raw, ends=unit == max(state.layers))
        ]
        self._ended_step = max(self._ended_step, state.step - 1)
        self._ended_s = self._ended_s or self._clock()
        for one in [one for one in self._followers.values() if one.place is _Place.WAITS]:
            one.place = _Place.TRAINS
            self._send(one, pieces)

    async def average(self, step: int, part: TrainerPart) -> TrainerPart:
        """Return the mean of the parts that end `step`, which every follower in time gets, too. See `Partners`."""
        await self._wait_for_parts()
        taking_part = [one for one in self._followers.values() if one.place is _Place.TRAINS]
        parts = [part, *(one.part for one in taking_part if one.part is not None)]
        mean = await asyncio.to_thread(mean_of, parts, self._norm)
        self._norm = part.norm if part.labels else self._norm
        raw, read_N = await asyncio.to_thread(self._encoder.encode, mean.vector_N)
        self._ended_step, self._ended_s = step, self._clock()
        pieces = [*share_pieces(step, mean, raw)]
        for one in taking_part:
            one.part, one.misses = None, 0
            if one.channel in self._followers:
                self._send(one, pieces)
        return TrainerPart(read_N, mean.labels, mean.loss)

    async def _wait_for_parts(self) -> None:
        """Wait for the parts of all followers in the round. One that is silent for too long misses it."""
        began_s = self._clock()
        patience_s = max(FLOOR_S, SLACK * (began_s - self._ended_s))
        while missing := [one for one in self._followers.values() if one.is_missing]:
            until_s = {one: self._deadline_s(one, began_s, patience_s) for one in missing}
            for one in [one for one in missing if until_s[one] <= self._clock()]:
                one.place, one.misses, one.coming = _Place.LATE, one.misses + 1, bytearray()
                log.info("trainer %s misses a round (%d in a row)", one.channel.peer, one.misses)
                if one.misses >= MISSES:
                    self._drop(one, Error(ErrorCode.STALE))
            await self._wait_for_change(max(0.0, min(until_s.values()) - self._clock()))

    def _deadline_s(self, follower: _Follower, began_s: float, patience_s: float) -> float:
        sends = follower.sending is not None and not follower.sending.done()
        moved_s = self._clock() if sends else follower.moved_s
        return min(max(began_s, moved_s) + patience_s, began_s + MOST_WAITS * patience_s)

    async def _wait_for_change(self, timeout_s: float | None, *others: asyncio.Future[Any]) -> None:
        self._changed.clear()
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            waiting: set[asyncio.Future[Any]] = {changed, *others}
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel_and_wait(changed)

    # -- conversations

    def _accept(self, channel: Channel, _frame: Frame, body: Body) -> None:
        try:
            self._admit(channel, body)
        except Busy as error:
            channel.close(Error(ErrorCode.BUSY, error.retry_s))
        except ProtocolError as error:
            log.info("a trainer is refused: %s", error)
            channel.close(Error(error.code))

    def _admit(self, channel: Channel, body: Body) -> None:
        """Take a follower that has the ticket: one of a peer, the newest, and one of a home on the open internet.

        Raises ProtocolError without a ticket, Busy if there is no room, or another trainer of the home.
        """
        if not isinstance(body, JoinTuning):
            raise ProtocolError("a conversation that does not begin with JOIN_TUNING")
        is_known = hmac.compare_digest(body.adapter + body.secret, self.adapter + self.secret)
        if not is_known or self._clock() > self._closes_s:
            raise ProtocolError("a ticket of another tuning, or an expired one", code=ErrorCode.REFUSED)
        for other in [follower for follower in self._followers.values() if follower.channel.peer == channel.peer]:
            self._drop(other, Error(ErrorCode.STALE))  # its link may have broken without a word
        group = channel.claimant.group
        is_home = is_wide(group) and not is_relayed_group(group)  # homes behind one relay have nothing in common
        if is_home and any(follower.channel.claimant.group == group for follower in self._followers.values()):
            raise Busy("another trainer of this home takes part", retry_s=FLOOR_S)
        # its bytes, the vector in them, and both on their way back
        memory = self._board.ledger.reserve(Account.AVERAGING, 2 * (self._size + self.layout.size_bytes(Codec.NONE)))
        try:
            self._make_place(group)
        except Busy:
            memory.release()
            raise
        follower = self._followers[channel] = _Follower(channel, memory)
        channel.on_frame = lambda frame, body: self._receive(follower, frame, body)
        channel.on_lost = lambda _error: self._drop(follower)
        channel.send(self._joined, at_once=True)

    def _make_place(self, group: str) -> None:
        """If all places are taken, end the newest follower of the group with most. Raises Busy if that would only swap places."""
        if len(self._followers) < MAX_FOLLOWERS:
            return
        crowds = Counter(channel.claimant.group for channel in self._followers)
        crowd, count = crowds.most_common(1)[0]
        if count <= crowds[group] + 1:
            raise Busy("there are enough trainers", retry_s=FLOOR_S)
        newest = next(channel for channel in reversed(self._followers) if channel.claimant.group == crowd)
        self._drop(self._followers[newest], Error(ErrorCode.BUSY, FLOOR_S))

    def _receive(self, follower: _Follower, frame: Frame, body: Body) -> None:
        follower.moved_s = self._clock()
        try:
            if isinstance(body, SharePiece):
                # Take a piece of a follower's part. Raises ProtocolError if it is not due, or of another size.
                due_step = self.averaging.next_end(self._ended_step + 1)
                is_late = body.step <= due_step and follower.place is _Place.LATE
                is_due = body.step == due_step and follower.is_missing
                came = body.offset + len(frame.payload)
                if not (is_late or is_due) or not len(frame.payload) or body.size != self._size or came > self._size:
                    raise ProtocolError("a piece of a part that is not due")
                if is_late and came == self._size:
                    self._wait_for_state(follower)
                elif is_due:
                    if body.offset != len(follower.coming) or body.labels > self.averaging.most_labels:
                        raise ProtocolError("a piece of a part that does not fit")
                    follower.coming += frame.payload
                    if len(follower.coming) == self._size:
                        vector_N = self.layout.decode(follower.coming, self.averaging.codec)
                        home = follower.channel.claimant.group
                        follower.part, follower.coming = (
                            TrainerPart(vector_N, body.labels, body.loss, home),
                            bytearray(),
                        )
                        self._change()
            elif isinstance(body, GetAdapter) and follower.place is _Place.JOINED:
                self._wait_for_state(follower)
            elif isinstance(body, End | Error):
                self._drop(follower)
            else:
                raise ProtocolError(f"an unexpected {type(body).__name__}")
        except ProtocolError as error:
            log.warning("trainer %s is left out: %s", follower.channel.peer, error)
            self._drop(follower, Error(error.code))

    def _wait_for_state(self, one: _Follower) -> None:
        one.place, one.coming, one.part = _Place.WAITS, bytearray(), None
        self._change()

    def _send(self, follower: _Follower, pieces: Sequence[tuple[Body, bytes]]) -> None:
        follower.sending = self._tasks.spawn(self._send_all(follower, pieces), f"send to {follower.channel.peer}")

    async def _send_all(self, follower: _Follower, pieces: Sequence[tuple[Body, bytes]]) -> None:
        try:
            for message, payload in pieces:
                await follower.channel.drain()
                follower.channel.send(message, payload=[payload], at_once=True)
            await follower.channel.drain()
        except PeerError as error:
            log.info("trainer %s is lost: %s", follower.channel.peer, error)
            self._drop(follower)
        follower.moved_s = self._clock()

    def _drop(self, follower: _Follower, last: Body | None = None) -> None:
        """End the conversation with a follower. Safe to call twice."""
        if self._followers.pop(follower.channel, None) is not None:
            follower.memory.release()
            follower.channel.close(last)
            self._change()

    def _change(self) -> None:
        self._changed.set()
        if self.trainers != self._reported_trainers:
            self._reported_trainers = self.trainers
            self._on_change(self._reported_trainers)
