"""Follower: a trainer of an adapter that another trainer leads; and the ticket that admits a follower."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable
from dataclasses import replace
from typing import Annotated, TypeVar, Union

import msgspec
from msgspec import Meta

from swarmnode.codec.body import DECODE_ERRORS, SESSION_ID_BYTES, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import End, Error
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import (
    COTUNE_PROTOCOL,
    AdapterPiece,
    GetAdapter,
    JoinTuning,
    SharePiece,
    TuningJoined,
)
from swarmnode.compute.training.adapters.adapter_recipe import AdapterRecipe
from swarmnode.errors import ErrorCode, LeaderLost, NetworkDown, PeerError, ProtocolError, UsageError, refusal
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import cancel_and_wait, unless_failed
from swarmnode.peer.questions import LocalPeer
from swarmnode.swarm.records.invite import ID_BYTES, MAX_ADDRESS_CHARS, MAX_BOOTSTRAPS, as_text, from_text
from swarmnode.swarm.records.run import decode_run
from swarmnode.tuning.adapter_parts import decode_recipe
from swarmnode.tuning.client.adapter_averaging import (
    Ended,
    Moved,
    SharedRun,
    TrainerPart,
    VectorEncoder,
    VectorLayout,
    patient,
    share_pieces,
)
from swarmnode.tuning.client.state_shapes import AdapterState, ComingState

T = TypeVar("T")
PREFIX = "tune1"
MAX_TICKET_CHARS = 4096
COMING_S, AGAIN_S = 30.0, 1.0  # for a leader that is out of reach; between two tries
SILENCE_S = 600.0  # of a leader whose link is alive
TICKET_S = 7 * 86400.0  # that a ticket is valid
STOPPED = "its leader has ended it"

Id = Annotated[bytes, Meta(min_length=SESSION_ID_BYTES, max_length=SESSION_ID_BYTES)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]


class Ticket(msgspec.Struct, array_like=True, frozen=True):
    """Ticket for one tuning: the swarm's id, the leader's peer id and addresses, the adapter's id, and the secret that admits."""

    swarm: Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
    leader: Annotated[str, Meta(min_length=1, max_length=MAX_ADDRESS_CHARS)]
    addresses: Annotated[tuple[Address, ...], Meta(max_length=MAX_BOOTSTRAPS)]
    adapter: Id
    secret: Id

    def __repr__(self) -> str:
        return f"<Ticket for {self.adapter.hex()[:8]} of {self.leader}>"

    def as_text(self) -> str:
        """Return the line of text to hand out."""
        return f"{PREFIX}{as_text(msgspec.msgpack.encode(self))}"

    @classmethod
    def read(cls, text: str) -> Ticket:
        """Return the ticket in a line of text. Raises UsageError if it is none, or damaged."""
        line = "".join(text.split()).lower()
        if not line.startswith(PREFIX) or len(line) > MAX_TICKET_CHARS:
            raise UsageError(f"this is no ticket: tickets begin with {PREFIX}; `tune --share` prints one")
        try:
            ticket = msgspec.msgpack.decode(from_text(line[len(PREFIX) :], "ticket"), type=cls)
        except DECODE_ERRORS as error:
            raise UsageError(f"this ticket is damaged: {error}; copy it again") from None
        if not all(map(str.isprintable, (ticket.leader, *ticket.addresses))):  # errors print them
            raise UsageError(
                "this ticket is not valid: its leader or an address has control characters; ask for another"
            )
        return ticket


log = logging.getLogger(__name__)

Answer = Union[TuningJoined, TrainerPart, AdapterState]


class TuningFollower:
    """Follower of an adapter's leader; see `Partners`. Made by `join`, ended by `close`. `layout` is set before `begin`.

    If the link to the leader breaks, the follower joins again, and goes on from the leader's state.
    """

    recipe: AdapterRecipe
    averaging: SharedRun
    wants_state = False
    layout: VectorLayout

    def __init__(self, board: Switchboard, ticket: Ticket) -> None:
        self._board = board
        self._ticket = ticket
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._answer: asyncio.Future[Answer] = self._loop.create_future()
        self._received_s = self._loop.time()
        self._silence_s = SILENCE_S
        self._step = 0  # that the present part ends
        self._expected: tuple[type[Body], ...] = ()
        self._coming = bytearray()  # of the mean
        self._state: ComingState  # the leader's

    @classmethod
    async def join(cls, peer: LocalPeer, ticket: Ticket) -> TuningFollower:
        """Call the leader, and take over its settings. Raises LeaderLost if it cannot be reached, or refuses this trainer."""
        links = replace(patient(peer.link_config), addresses_of=lambda _peer: ticket.addresses)
        self = cls(Switchboard(peer.network, COTUNE_PROTOCOL, peer.hello, links), ticket)
        try:
            joined = await self._join()
            self.recipe = decode_recipe(joined.recipe)
            self.averaging = SharedRun(decode_run(joined.run), joined.every, Codec(joined.codec))
            self.averaging.check()
        except (PeerError, NetworkDown, Ended) as error:
            await self.close()
            raise LeaderLost(f"the leader of the tuning cannot be reached: {error}") from error
        except ValueError as error:
            await self.close()
            raise LeaderLost(f"the leader's settings are not valid: {error}") from None
        except BaseException:
            await self.close()
            raise
        self._leave()  # for the time that the data take
        return self

    async def close(self) -> None:
        """Leave the tuning."""
        self._leave()
        await self._board.close()

    # -- as a partner

    async def begin(self, stop: asyncio.Event) -> AdapterState | None:
        """Wait for the leader's state. See `Partners`."""
        self._encoder = VectorEncoder(self.layout, self.averaging.codec)
        coming = asyncio.ensure_future(self._come(TICKET_S))  # the leader may wait for further trainers
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        except Ended as ended:
            raise LeaderLost(f"the tuning is over: {ended}") from None
        finally:
            await cancel_and_wait(coming, stopped)

    def give(self, state: AdapterState) -> None:
        """Do nothing: trainers that need a state ask the leader."""

    async def average(self, step: int, part: TrainerPart) -> TrainerPart:
        """Send a part to the leader, and return the mean. See `Partners`."""
        raw, _ = await asyncio.to_thread(self._encoder.encode, part.vector_N)
        self._step = step
        try:
            answer = await self._ask(share_pieces(step, part, raw), SharePiece, AdapterPiece)
        except PeerError as error:
            log.info("the leader %s is away at step %d: %s", self._ticket.leader, step, error)
            answer = await self._come(SILENCE_S)
        if isinstance(answer, TrainerPart):
            return answer
        assert isinstance(answer, AdapterState)
        self._encoder.forget()
        raise Moved(answer)

    # -- the conversation

    async def _come(self, silence_s: float) -> AdapterState:
        """Join, and return the leader's state. Raises LeaderLost if the leader cannot be reached for `COMING_S`, or refuses."""
        deadline_s = self._loop.time() + COMING_S
        while True:
            try:
                await self._join()
                self._silence_s = silence_s
                state = await self._ask([(GetAdapter(0), b"")], AdapterPiece)
            except (PeerError, NetworkDown) as error:
                if self._loop.time() > deadline_s:
                    raise LeaderLost(f"the leader of the tuning has gone: {error}") from error
                await asyncio.sleep(AGAIN_S)
                continue
            self._silence_s = SILENCE_S
            assert isinstance(state, AdapterState)
            await asyncio.to_thread(self._check, state)
            return state

    async def _join(self) -> TuningJoined:
        """Begin a conversation in place of the last one. Raises PeerError, NetworkDown, LeaderLost, Ended."""
        self._leave()
        self._failed = self._loop.create_future()
        self._channel = await self._board.call(self._ticket.leader, self._receive, self._fail)
        joined = await self._ask([(JoinTuning(self._ticket.adapter, self._ticket.secret), b"")], TuningJoined)
        assert isinstance(joined, TuningJoined)
        return joined

    def _leave(self) -> None:
        """End the conversation."""
        if self._channel is not None:
            self._channel.close()
        for future in (self._failed, self._answer):
            if not future.cancel() and not future.cancelled():
                future.exception()  # marks it as retrieved

    async def _ask(self, messages: Iterable[tuple[Body, bytes]], *expected: type[Body]) -> Answer:
        """Send messages, and return the answer, of an `expected` kind. Raises PeerError, LeaderLost, Ended."""
        assert self._channel is not None
        if self._failed.done():
            self._failed.result()  # raises why the conversation has ended meanwhile
        self._answer, self._coming, self._expected = self._loop.create_future(), bytearray(), expected
        if AdapterPiece in expected:
            shapes = self.layout.shapes
            self._state = ComingState(shapes, range(len(shapes.units)))
        for message, payload in messages:
            self._channel.send(message, payload=[payload] if payload else (), at_once=True)
            await self._until_done(self._channel.drain())
        return await self._until_done(self._answer)

    async def _until_done(self, work: Awaitable[T]) -> T:
        """Wait for `work`. Raises PeerError if the link breaks, LeaderLost if the leader is silent, Ended if it has ended all."""
        self._received_s = self._loop.time()
        try:
            return await unless_failed(
                work, self._failed, lambda: self._received_s + self._silence_s - self._loop.time()
            )
        except asyncio.TimeoutError:
            raise LeaderLost(f"the leader of the tuning has said nothing for {self._silence_s:.0f} seconds") from None

    def _fail(self, error: Exception) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)

    def _receive(self, frame: Frame, body: Body) -> None:
        self._received_s = self._loop.time()
        try:
            # Take a frame of the leader. Raises ProtocolError if it is not due.
            if isinstance(body, End):
                self._fail(Ended(STOPPED))
            elif isinstance(body, Error):
                left_out = "it left this trainer out, which missed several rounds"
                why = left_out if body.code == ErrorCode.STALE else str(refusal(body.code, peer=self._ticket.leader))
                self._fail(LeaderLost(f"the leader of the tuning refuses this trainer: {why}"))
            elif self._answer.done() or not isinstance(body, self._expected):
                raise ProtocolError(f"an unexpected {type(body).__name__}")
            elif isinstance(body, TuningJoined):
                self._answer.set_result(body)
            elif isinstance(body, SharePiece):
                size = self.layout.size_bytes(self.averaging.codec)
                came = len(self._coming) + len(frame.payload)
                is_due = body.step == self._step and body.offset == len(self._coming) and body.size == size
                if not is_due or not len(frame.payload) or came > size:
                    raise ProtocolError("a piece of a mean that is not due")
                self._coming += frame.payload
                if came == size:
                    vector_N = self.layout.decode(self._coming, self.averaging.codec)
                    self._answer.set_result(TrainerPart(vector_N, body.labels, body.loss))
            elif isinstance(body, AdapterPiece):
                self._state.accept_piece(body, frame.payload)
                if self._state.is_complete:
                    self._answer.set_result(AdapterState(body.step, self._state.files))
        except ProtocolError as error:
            self._fail(LeaderLost(f"the leader of the tuning breaks the protocol: {error}"))

    def _check(self, state: AdapterState) -> None:
        try:
            for unit, raw in state.layers.items():
                self.layout.shapes.check(unit, raw, state.step, gradients=False, peer=self._ticket.leader)
        except ProtocolError as error:
            raise LeaderLost(f"the leader of the tuning gave a state that is not the adapter's: {error}") from None
