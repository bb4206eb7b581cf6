"""The client's side of a session: it names the route, feeds the first hop, hears the last one, and mends what breaks.

The client alone names routes, so there is one order of epochs and a client's wishes about whom to trust hold after a
fault as before it. Whoever notices a fault tells the client; the hops keep journals, so mending costs one pass over what
the new peer lacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from msgspec.structs import replace

from swarmnode.codec.body import MAX_LINK_CODECS, SESSION_ID_BYTES, Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.measuring_messages import Ran, trace_id
from swarmnode.codec.messages import (
    Attach,
    Branch,
    End,
    Error,
    Fault,
    KeepCache,
    LinkCodec,
    Mode,
    Open,
    Output,
    Truncate,
    Want,
    branch_proof,
)
from swarmnode.codec.tensors import Codec
from swarmnode.config import ClientConfig
from swarmnode.errors import (
    Busy,
    ErrorCode,
    NetworkDown,
    NoRoute,
    PeerError,
    PeerLost,
    PeerRefused,
    SwarmnodeError,
    refusal,
)
from swarmnode.ledger import Account
from swarmnode.measuring.meters import ClientMeter
from swarmnode.measuring.timing import Cadence, Timing
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.hop import Entry, Hop
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.plan.serving.codec_schedule import CodecSchedule
from swarmnode.serving.client.blame import Blame, Verdict
from swarmnode.serving.client.router import Route, Router
from swarmnode.serving.client.session_spec import Received, ServedWork, SessionSpec, ids_entry
from swarmnode.swarm.records.manifest import SERVING_CODECS

log = logging.getLogger(__name__)

SESSION_PROTOCOL = "/swarmnode/session/1"

FINAL = (ErrorCode.TOO_LARGE, ErrorCode.NOT_FINITE, ErrorCode.INVALID_REQUEST)  # waiting for other peers would not help
TOLD = (*FINAL, ErrorCode.NOT_FOUND)


class ToldCodecs:
    """Of one session, by the unit that the states enter."""

    def __init__(self, first: Codec, told: Iterable[LinkCodec] = ()) -> None:
        self._first = first
        self._schedules: dict[int, CodecSchedule] = {}
        for one in told:
            self._note(one)

    def __repr__(self) -> str:
        return f"<ToldCodecs of {len(self._schedules)} units>"

    @property
    def told(self) -> tuple[LinkCodec, ...]:
        """All of it, for OPEN."""
        schedules = self._schedules.items()
        return tuple(LinkCodec(unit, start, codec) for unit, one in schedules for start, codec in one.changes)

    def hear(self, told: LinkCodec, route: Sequence[HopSpec], max_length: int) -> None:
        """A hop has chosen. What none of the route can have chosen is left out, and what no OPEN has room for: else nobody would
        take over from it."""
        is_between = told.unit in {hop.end for hop in route[:-1]} and told.codec in SERVING_CODECS
        if is_between and told.start < max_length and len(self.told) < MAX_LINK_CODECS:
            self._note(told)

    def _note(self, told: LinkCodec) -> None:
        schedule = self._schedules.setdefault(told.unit, CodecSchedule(self._first))
        if not schedule.full:
            schedule.change(told.start, Codec(told.codec))

    def truncate(self, to: int) -> None:
        """The positions from `to` on are to come again."""
        for schedule in self._schedules.values():
            schedule.truncate(to)


@dataclass
class SessionStats:
    """What a session went through, for whoever watches."""

    reroutes: int = 0
    longest_stall_s: float = 0.0
    faults: list[tuple[PeerId, str]] = field(default_factory=list)


@dataclass(eq=False)
class ClientSession:
    """One session of a client. Use: `await start()`, `send(...)`, `await receive()`, `await close()`."""

    switchboard: Switchboard
    router: Router
    spec: SessionSpec
    config: ClientConfig
    _: KW_ONLY
    meter: ClientMeter = field(default_factory=ClientMeter)
    clock: Callable[[], float] = time.monotonic
    on_over: Callable[[ServedWork], None] = lambda _served: None

    def __post_init__(self) -> None:
        self.id = secrets.token_bytes(SESSION_ID_BYTES)
        self.trace_id = trace_id(self.id)
        self.stats = SessionStats()
        self.route: Route = ()
        self.epoch = 0
        self._journal = self.switchboard.ledger.count(Account.JOURNALS)
        self._first = Hop(
            self.switchboard, self._from_first, lambda error: self._fault(self.epoch, 0, error), self._journal
        )
        self._timing: Timing | None = None
        self._cadence: Cadence | None = None
        self._served = ServedWork()
        self._last: Channel | None = None
        self._expected = 0  # position of the next output
        self._wanted = 1  # positions that it is of
        self._drawn: list[int] = []  # tokens, in RING mode
        self.known = 0  # outputs for positions below this one came over earlier routes
        self._truncate: Truncate | None = None  # what this text does not have in common with the one before it
        self._branch: Branch | None = None  # for the first OPEN: whoever takes over is sent all
        self.had = 0  # positions that the first hop had when it was opened, or opened for another text
        self._mending: asyncio.Task[None] | None = None
        self._complete = False  # whether the last output has come: nothing is mended any more
        self._tainted = False  # whether some hop may hold what no honest one made
        self._received: asyncio.Queue[Received | SwarmnodeError] = asyncio.Queue()
        self._faults: asyncio.Queue[tuple[int, int, PeerError]] = asyncio.Queue()
        self._codecs = ToldCodecs(self.spec.codec, self.spec.codecs)
        self._blame = Blame(self.clock, avoid_s=self.config.avoid_s)
        self._last_progress_s = self.clock()
        self._tasks = Tasks(f"session {self.trace_id.hex()[:8]}", on_crash=self._crashed)
        self._log = logging.LoggerAdapter(log, {"trace": self.trace_id.hex()})

    def __repr__(self) -> str:
        hops = " -> ".join(f"{hop.peer[-6:]}[{hop.start}:{hop.end})" for hop in self.route)
        return f"<ClientSession {self.trace_id.hex()[:8]} epoch {self.epoch} at {self._first.end} positions via {hops or 'nobody'}>"

    @property
    def settled(self) -> SessionSpec:
        """How it was computed, for whoever computes it again."""
        return dataclasses.replace(self.spec, adapts=False, codecs=self._codecs.told)

    @property
    def length(self) -> int:
        """Positions sent, or drawn by the swarm and heard of."""
        return self._first.end

    async def start(self) -> None:
        """Open along the best route. Raises NoRoute, Busy, NetworkDown after the configured patience."""
        epoch, branch = self.epoch, self._branch
        await self._bind()
        self.had = self._first.had if self.epoch == epoch + 1 else 0
        if branch is not None:
            self._served.given(self.id, self.route, self.had)
        self._mending = self._tasks.spawn(self._mend(), "mend")

    async def keep(self) -> None:
        """The last output has come: the hops keep what they have while they have room, for `go_on`."""
        if self._mending is not None:
            await cancel_and_wait(self._mending)
        self._first.tell(KeepCache())

    def go_on(self, spec: SessionSpec, begin: int) -> None:
        """Before `start`: another text, which begins as the last one does, up to a position. It is sent what comes after that."""
        assert spec.sampling is not None
        self._truncate = None
        if begin < self.length:
            self._truncate = self._first.truncation(begin)
            self._first.cut(self._truncate)
            self._codecs.truncate(begin)
        self.spec, self.stats, self._drawn, self._complete = spec, SessionStats(), [], False
        self._expected, self._wanted = spec.sampling.prompt_length, 1
        self._last_progress_s = self.clock()

    @property
    def truncations(self) -> int:
        """How often another text took the place of this session's."""
        return self._first.truncations

    def begin_as(self, source: ClientSession, truncations: int, entries: Sequence[Entry]) -> None:
        """Before `start`: the inputs in these entries are those of a source, too, as it was after so many truncations. Hops that
        have them there need not compute them."""
        for entry in entries:
            self._first.record(entry)
        self._branch = Branch(branch_proof(source.id, truncations, self.id, self.length), self.length)
        self._codecs = ToldCodecs(self.spec.codec, (one for one in source._codecs.told if one.start < self.length))

    def send(self, entry: Entry, *, expect: int | None = None) -> None:
        """Send an input; positions from its first one on are taken back. `expect`: of the output that it will bring, if any."""
        if entry.start < self.length:
            entry = replace(entry, truncate=self._first.truncation(entry.start))
            self._codecs.truncate(entry.start)
        if expect is not None:
            self._expected = expect
            self._wanted = entry.count if entry.body.want == Want.ALL else 1
        self._last_progress_s = self.clock()
        if self._timing is not None and entry.count == 1:
            self._timing.sent(entry.end)
        self._first.send(entry)

    async def receive(self) -> Received:
        """The next output. Raises what ended the session where it cannot go on."""
        item = await self._received.get()
        if isinstance(item, SwarmnodeError):
            self._received.put_nowait(item)
            raise item
        return item

    async def stay(self) -> None:
        """All outputs have come: from now on no route is mended, and the hops keep what they have until `close`."""
        await self._tasks.close()

    async def close(self) -> None:
        """End the session in order; the hops free its cache."""
        await self._tasks.close()
        self._first.unbind()
        if self._last is not None:
            self._last.close()
        self._journal.release()
        self.on_over(self._served.taken())

    # -- frames

    def _from_first(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Ran) and self._timing is not None:
            self._timing.heard(frame.seq, body, self._first.rtt_s)
            self._timing.learn(body)
        elif isinstance(body, LinkCodec) and self.spec.adapts and body.codec in self.spec.allowed:
            self._codecs.hear(body, self.route, self.spec.max_length)
        elif isinstance(body, Fault) and body.index < len(self.route):
            error = refusal(body.code, retry_s=body.retry_s, peer=self.route[body.index].peer)
            self._fault(body.epoch, body.index, error)

    def _from_last(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Output):
            self._hear(frame.seq, body, frame.payload)
        elif isinstance(body, Error | End):
            code = body.code if isinstance(body, Error) else ErrorCode.PEER_LOST
            error = refusal(code, retry_s=getattr(body, "retry_s", 0.0), peer=self.route[-1].peer)
            self._fault(self.epoch, len(self.route) - 1, error)

    def _hear(self, position: int, output: Output, payload: Buffer) -> None:
        if position != self._expected:
            return  # a replay brought again what we have
        if not self.spec.allows(output, payload, self._wanted):
            last = self.route[-1].peer
            error = PeerLost(f"peer {last} sends what was not asked for", peer=last)
            self._tainted = True  # in a ring it went to the first hop, too
            self._fault(self.epoch, len(self.route) - 1, error)
            return
        now_s = self.clock()
        self.stats.longest_stall_s = max(self.stats.longest_stall_s, now_s - self._last_progress_s)
        self._last_progress_s = now_s
        for peer, code in self._blame.progress(self.route):
            self.router.suspect(peer, code.name)
        self._served.heard(self.id, self.route, self.spec.rows * position)
        if self._cadence is not None:
            self._cadence.heard(position)
        if self.spec.mode == Mode.RING:
            self._expected += 1
            self._drawn.append(output.ids[0])
            self._complete = output.final
            if not output.final:
                # The ring feeds it to the first hop; we only keep it, for a first hop that comes later.
                self._first.record(ids_entry(position, [output.ids], Want.NOTHING))
        self._received.put_nowait(Received(position, output, payload))

    # -- faults

    def _crashed(self, error: BaseException) -> None:
        """Nobody mends the session any more: whoever waits for an output is told."""
        self._received.put_nowait(
            SwarmnodeError(f"the session ended by a bug of this client: {error!r}; its log says where")
        )

    def _fault(self, epoch: int, index: int, error: PeerError) -> None:
        if epoch == self.epoch:
            self._faults.put_nowait((epoch, index, error))

    async def _mend(self) -> None:
        while True:
            try:
                epoch, index, error = await asyncio.wait_for(self._faults.get(), self.config.progress_s)
            except asyncio.TimeoutError:
                if self.clock() - self._last_progress_s < self.config.progress_s or self._received.qsize():
                    continue
                epoch, index, error = self.epoch, -1, PeerLost("no output although all links are alive")
            if epoch != self.epoch or self._complete:
                continue
            self.stats.reroutes += 1
            self.meter.reroutes[error.code] += 1
            try:
                if index >= 0:
                    self._judge(self.route[index], error)
                else:
                    self._blame.leave_out(self.route)
                await self._bind(error)
            except SwarmnodeError as failure:
                if error.code == ErrorCode.DRAINING and isinstance(failure, NoRoute):
                    continue  # nobody can take over, and the leaving hop still serves
                self._received.put_nowait(failure)
                return

    def _judge(self, hop: HopSpec, error: PeerError) -> None:
        """Leave out whose fault it is. Raises the error where it is the request's own."""
        code = ErrorCode(error.code)
        if code == ErrorCode.STALE or self._tainted:
            self._start_over()
        self.stats.faults.append((hop.peer, code.name))
        self._log.info("session %s: peer %s: %s", self.trace_id.hex()[:8], hop.peer, error)
        verdict = self._blame.judge(hop, code, retry_s=getattr(error, "retry_s", None) or 0.0)
        if verdict is Verdict.PEER:
            self.router.suspect(hop.peer, code.name)
        elif verdict is Verdict.REQUEST:
            text = f"the request fails wherever it is computed; lately {error}"
            raise PeerRefused(text, code=code, peer=hop.peer)

    def _start_over(self) -> None:
        """As another session: a peer of one of its routes has taken this one over, by an epoch newer than ours; or the hops hold
        what we did not send."""
        self._tainted = False
        self.id = secrets.token_bytes(SESSION_ID_BYTES)
        self.trace_id = trace_id(self.id)

    async def _bind(self, error: SwarmnodeError | None = None) -> None:
        """Open the next epoch along the best route, trying others while peers fail, as long as patience lasts.

        `error` is why a new epoch is needed.
        """
        deadline_s = self.clock() + self.config.patience_s
        while True:
            now_s = self.clock()
            try:
                self.route = self.router.route(self._blame.avoided, self.route, self.spec.size)
            except NoRoute as failure:
                reason = self._why(error, failure)
                if now_s >= deadline_s or reason.code in FINAL:
                    raise reason from None
                pardon_s = self._blame.pardon_s
                await self._news(min(deadline_s - now_s, 1.0 if pardon_s is None else pardon_s, 1.0))
                continue
            try:
                await self._open_unless_faulty()
                return
            except PeerError as failure:
                error = failure
                hop = next((hop for hop in self.route if hop.peer == failure.peer), self.route[0])
                self._judge(hop, failure)
            if self.clock() >= deadline_s:
                raise NoRoute(f"no route through the swarm for {self.config.patience_s:.0f} s; at last {error}")

    async def _open_unless_faulty(self) -> None:
        """Open an epoch. A hop may hear sooner than we that another one is gone: then there is nothing to wait for."""
        opening = self._tasks.spawn(self._open(), "open", awaited=True)
        faulty = self._tasks.spawn(self._next_fault(), "hear of faults", awaited=True)
        try:
            await asyncio.wait([opening, faulty], return_when=asyncio.FIRST_COMPLETED)
            if faulty.done():  # though it may be open by now: who mends hears of no fault twice
                raise faulty.result()
            opening.result()
        finally:
            await cancel_and_wait(opening, faulty)

    async def _next_fault(self) -> PeerError:
        """Of the epoch in force, by a hop of its route."""
        while True:
            epoch, _, error = await self._faults.get()
            if epoch == self.epoch:
                return error

    @staticmethod
    def _why(error: SwarmnodeError | None, no_route: NoRoute) -> SwarmnodeError:
        """What to tell the user when no route is left: that peers are full says more than that none is there."""
        if isinstance(error, PeerRefused) and error.code == ErrorCode.BUSY:
            retry_s = error.retry_s or 1.0
            return Busy(f"the swarm is full at the moment; try again in {retry_s:.0f} s", retry_s=retry_s)
        told = isinstance(error, Busy) or (isinstance(error, PeerRefused) and error.code in TOLD)
        return error if told and error is not None else no_route

    async def _news(self, timeout_s: float) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.router.changed(), max(0.05, timeout_s))

    async def _open(self) -> None:
        if self._complete:  # it came while a route was looked for
            return
        self.epoch, self.known = self.epoch + 1, self._expected
        spec = self.spec
        branch, self._branch = self._branch, None
        opened = Open(
            session=self.id,
            epoch=self.epoch,
            route=self.route,
            index=0,
            mode=spec.mode,
            rows=spec.rows,
            max_length=spec.max_length,
            codec=spec.codec,
            sampling=spec.sampling,
            padding=spec.padding,
            known=self.known,
            truncate=self._truncate,
            codecs=self._codecs.told,
            adapts=spec.adapts,
            adapter=spec.adapter,
            branch=branch,
        )
        if self._last is not None:
            self._last.close()
            self._last = None
        ring, observed_latency = spec.mode == Mode.RING, self.router.observed_latency
        self._timing = Timing(self.route, -1, observed_latency, self.clock, ring=ring)
        self._cadence = Cadence(self.route[0], observed_latency, self.clock) if ring and len(self.route) == 1 else None
        try:
            await self._first.open(self.route[0].peer, opened, spec.text(self._drawn))
            index = len(self.route) - 1
            epoch = self.epoch
            self._last = await self.switchboard.call(
                self.route[index].peer, self._from_last, lambda error: self._fault(epoch, index, error)
            )
            self._last.send(Attach(self.id, self.epoch, start=self._expected))
            self._log.info("opened %r", self)
        except NetworkDown as error:
            raise PeerLost(str(error), peer=self.route[0].peer) from error
