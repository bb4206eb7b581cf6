"""The client's side of a session: it chooses the route, feeds the first hop, receives from the last hop, and reroutes
after faults.

Only the client chooses routes. So epochs have one order, and the client's choice of trusted peers holds after a fault
as before it. Every peer that notices a fault reports it to the client. Hops keep journals, so a reroute costs one pass
over the positions that the new peer lacks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from msgspec.structs import replace

from swarmnode import tolerances
from swarmnode.codec.body import MAX_DRAFTS, MAX_LINK_CODECS, SESSION_ID_BYTES, Body, HopSpec
from swarmnode.codec.frames import Frame
from swarmnode.codec.handover_messages import MAX_LEAVING, TookOver
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
from swarmnode.links.hop import Entry, Hop
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.measuring.meters import ClientMeter
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.peer.paths import Cadence, Timing
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.client.router import Blame, HopFault, Route, Router, Verdict, suspects_of
from swarmnode.serving.client.session_spec import Received, ServedWork, SessionSpec, ids_entry
from swarmnode.swarm.records.manifest import SERVING_CODECS

log = logging.getLogger(__name__)

SESSION_PROTOCOL = "/swarmnode/session/1"

OF_ADAPTERS = (
    ErrorCode.ADAPTER_REFUSED,
    ErrorCode.ADAPTER_QUOTA,
    ErrorCode.ADAPTER_EXPIRED,
    ErrorCode.ADAPTER_PRIVATE,
)
FINAL = (  # waiting for other peers would not help
    ErrorCode.TOO_LARGE,
    ErrorCode.NOT_FINITE,
    ErrorCode.INVALID_REQUEST,
    *OF_ADAPTERS,
)
TOLD = (*FINAL, ErrorCode.NOT_FOUND)


WithAdapter = Callable[[Open], Awaitable[Open]]
"""Function that makes an OPEN with an adapter ready to be sent: its ticket is in the result, and hops can fetch its files"""


async def as_it_is(opened: Open) -> Open:
    """Return an OPEN unchanged: its adapter is one of the manifest's."""
    return opened


class ReportedCodecs:
    """Codecs that the hops of one session chose and reported, by the layer that the states enter."""

    def __init__(self, first: Codec, reported: Iterable[LinkCodec] = ()) -> None:
        self._first = first
        self._schedules: dict[int, CodecSchedule] = {}
        for one in reported:
            self._apply(one)

    @property
    def link_codecs(self) -> tuple[LinkCodec, ...]:
        """Return all codecs that hops chose, as an OPEN message carries them to a new hop."""
        schedules = self._schedules.items()
        return tuple(LinkCodec(unit, start, codec) for unit, one in schedules for start, codec in one.changes)

    def record(self, choice: LinkCodec, route: Sequence[HopSpec], max_length: int) -> None:
        """Note a hop's choice of a codec.

        A choice is ignored if no hop of `route` can have made it, or if an OPEN has no room for it: no other peer could
        take over from that hop.
        """
        is_between = choice.unit in {hop.end for hop in route[:-1]} and choice.codec in SERVING_CODECS
        if is_between and choice.start < max_length and len(self.link_codecs) < MAX_LINK_CODECS:
            self._apply(choice)

    def _apply(self, choice: LinkCodec) -> None:
        schedule = self._schedules.setdefault(choice.unit, CodecSchedule(self._first))
        if not schedule.full:
            schedule.change(choice.start, Codec(choice.codec))

    def truncate(self, to: int) -> None:
        """Forget the choices for positions from `to` on, which will be sent again."""
        for schedule in self._schedules.values():
            schedule.truncate(to)


@dataclass
class SessionStats:
    """Disturbances of one session: reroutes, the longest wait for an output, and the faults as (peer, name of the error
    code)."""

    reroutes: int = 0
    longest_stall_s: float = 0.0
    faults: list[tuple[PeerId, str]] = field(default_factory=list)


@dataclass(eq=False)
class ClientSession:
    """Session of a client. Use: `await start()`, `send(...)`, `await receive()`, `await close()`."""

    switchboard: Switchboard
    router: Router
    spec: SessionSpec
    config: ClientConfig
    _: KW_ONLY
    meter: ClientMeter = field(default_factory=ClientMeter)
    clock: Callable[[], float] = time.monotonic
    on_over: Callable[[ServedWork], None] = lambda _served: None
    with_adapter: WithAdapter = as_it_is

    def __post_init__(self) -> None:
        self.id = secrets.token_bytes(SESSION_ID_BYTES)
        self.trace_id = trace_id(self.id)
        self.stats = SessionStats()
        self.route: Route = ()
        self.epoch = 0
        self._journal = self.switchboard.ledger.count(Account.JOURNALS)
        self._first = Hop(
            self.switchboard, self._from_first, lambda error: self._fault(self.epoch, error), self._journal
        )
        self._timing: Timing | None = None
        self._cadence: Cadence | None = None
        self._served = ServedWork()
        self._last: Channel | None = None
        self._expected = 0  # position of the next output
        self._wanted = 1  # number of positions that it covers
        self._drawn: list[int] = []  # drawn tokens, in RING mode
        self.received_end = 0  # outputs for positions below this one came over earlier routes
        self._truncate: Truncate | None = (
            None  # before the first input of another text: cuts what the texts do not share
        )
        self._branch: Branch | None = (
            None  # only for the first OPEN: a peer that takes over later is sent all positions
        )
        self.had = 0  # positions that the first hop already had when `start` opened it
        self._mending: asyncio.Task[None] | None = None
        self._complete = False  # whether the last output has come: then no fault is mended any more
        self._tainted = False  # whether a hop may hold positions that no honest peer made
        self._leaving: dict[
            PeerId, HopSpec
        ] = {}  # hops that still have the session's cache, for those that take their place
        self._left_in = 0  # epoch of the last of them
        self._may_take_over: frozenset[HopSpec] = frozenset()  # hops that may have asked one of them
        self.was_taken_over = False  # whether a hop has positions that it did not compute, and cannot account for
        self._received: asyncio.Queue[Received | SwarmnodeError] = asyncio.Queue()
        self._faults: asyncio.Queue[tuple[int, PeerError]] = asyncio.Queue()
        self._codecs = ReportedCodecs(self.spec.codec, self.spec.codecs)
        self._blame = Blame(self.clock, avoid_s=self.config.avoid_s)
        self._last_progress_s = self.clock()
        self._tasks = Tasks(f"session {self.trace_id.hex()[:8]}", on_crash=self._crashed)
        self._log = logging.LoggerAdapter(log, {"trace": self.trace_id.hex()})

    def __repr__(self) -> str:
        hops = " -> ".join(f"{hop.peer[-6:]}[{hop.start}:{hop.end})" for hop in self.route)
        return f"<ClientSession {self.trace_id.hex()[:8]} epoch {self.epoch} at {self._first.end} positions via {hops or 'nobody'}>"

    @property
    def settled(self) -> SessionSpec:
        """Specification with the codecs that the hops actually used, and without guesses, for computing the session again."""
        return dataclasses.replace(self.spec, adapts=False, codecs=self._codecs.link_codecs, proposer="")

    @property
    def length(self) -> int:
        """Number of positions that were sent, or drawn by the swarm and fed in there."""
        return self._first.end

    async def start(self) -> None:
        """Open the session along the best route.

        Raises NoRoute or Busy if no route could be opened within the configured patience, and PeerRefused if peers
        refuse the request itself.
        """
        epoch, branch = self.epoch, self._branch
        await self._bind()
        self.had = self._first.had if self.epoch == epoch + 1 else 0
        if branch is not None:
            self._served.record_copied(self.id, self.route, self.had)
        self._mending = self._tasks.spawn(self._mend(), "mend")

    async def retain(self) -> None:
        """Stop rerouting and ask the hops to keep their caches while they have room, for `go_on`. Call after the last
        output."""
        if self._mending is not None:
            await cancel_and_wait(self._mending)
        self._first.tell(KeepCache())

    def go_on(self, spec: SessionSpec, begin: int) -> None:
        """Continue this kept session with another text, whose positions below `begin` are the same. Call before
        `start`.

        Only the positions from `begin` on are to be sent.
        """
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
        """Number of times that positions were taken back, as when another text took the place of this session's text."""
        return self._first.truncations

    def begin_as(self, source: ClientSession, truncations: int, entries: Sequence[Entry]) -> None:
        """Begin with positions that the session `source` had after `truncations` truncations. Call before `start`.

        `entries` are the inputs for these positions. Hops that still hold them for `source` need not compute them
        again.
        """
        for entry in entries:
            self._first.record(entry)
        self._branch = Branch(branch_proof(source.id, truncations, self.id, self.length), self.length)
        self._codecs = ReportedCodecs(
            self.spec.codec, (one for one in source._codecs.link_codecs if one.start < self.length)
        )

    def send(self, entry: Entry, *, expect: int | None = None) -> None:
        """Send an input. If earlier inputs cover its positions, these and all later positions are taken back first.

        `expect` is the position of the output that this input leads to; None if it leads to none.
        """
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
        """Wait for the next output and return it. Raises the SwarmnodeError that ended the session."""
        item = await self._received.get()
        if isinstance(item, SwarmnodeError):
            self._received.put_nowait(item)
            raise item
        return item

    async def stay(self) -> None:
        """Stop rerouting, after the last output. The hops keep their caches until `close`."""
        await self._tasks.close()

    async def close(self) -> None:
        """Close the session, so that the hops free its caches, and report the served work to `on_over`."""
        await self._tasks.close()
        self._first.unbind()
        if self._last is not None:
            self._last.close()
        self._journal.release()
        self.on_over(self._served.drain())

    # -- frames

    def _from_first(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Ran) and self._timing is not None:
            self._timing.record_report(frame.seq, body, self._first.rtt_s)
            self._timing.learn(body)
        elif isinstance(body, LinkCodec) and self.spec.adapts and body.codec in self.spec.allowed:
            self._codecs.record(body, self.route, self.spec.max_length)
        elif isinstance(body, TookOver) and body.index < len(self.route):
            if (hop := self.route[body.index]) in self._may_take_over:
                self.was_taken_over = True
                self._served.record_taken_over(self.id, hop, self.spec.rows * body.length)
        elif isinstance(body, Fault) and body.epoch == self.epoch and body.index < len(self.route):
            self._fault(body.epoch, self._reported(body, self._signer(body), by=0))

    def _from_last(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Output):
            self._receive(frame.seq, body, frame.payload)
        elif isinstance(body, Fault) and body.index in range(len(self.route))[-2:]:
            self._fault(body.epoch, self._reported(body, len(self.route) - 1, by=len(self.route) - 1))
        elif isinstance(body, Error | End):
            code = body.code if isinstance(body, Error) else ErrorCode.PEER_LOST
            last = len(self.route) - 1
            told = Fault(self.epoch, last, code, getattr(body, "retry_s", 0.0))
            self._fault(self.epoch, self._reported(told, last, by=last))

    def _receive(self, position: int, output: Output, payload: Buffer) -> None:
        if position != self._expected:
            return  # already received: a replay brings it again
        if not self.spec.allows(output, payload, self._wanted):
            last = self.route[-1].peer
            error = PeerLost(f"peer {last} sent an output that does not fit the request", peer=last)
            self._tainted = True  # in a ring the token went to the first hop, too
            self._fault(self.epoch, error)
            return
        now_s = self.clock()
        self.stats.longest_stall_s = max(self.stats.longest_stall_s, now_s - self._last_progress_s)
        self._last_progress_s = now_s
        if self.epoch > self._left_in:
            self._leaving.clear()
        for peer, code in self._blame.progress(self.route):
            self.router.suspect(peer, code.name)
        self._served.record_computed(self.id, self.route, self.spec.rows * position)
        if self._cadence is not None:
            self._cadence.record_output(position)
        if self.spec.mode == Mode.RING:
            self._expected += 1
            self._drawn.append(output.ids[0])
            self._complete = output.final
            if not output.final:
                # The ring feeds it to the first hop; the client only keeps it, for a peer that takes over as first hop.
                self._first.record(ids_entry(position, [output.ids], Want.NOTHING))
        self._received.put_nowait(Received(position, output, payload))

    # -- faults

    def _crashed(self, error: BaseException) -> None:
        """End `receive` with an error: without the mending task no fault would be handled."""
        self._received.put_nowait(SwarmnodeError(f"a bug in this client ended the session: {error!r}; see its log"))

    def _fault(self, epoch: int, error: PeerError) -> None:
        if epoch == self.epoch:
            self._faults.put_nowait((epoch, error))

    def _signer(self, body: Fault) -> int | None:
        """Return the hop that signed a report: the failed one, a neighbour of it, or the first hop; None if none of them did."""
        statement, near = body.statement(self.id), {0, body.index - 1, body.index, body.index + 1}
        places = sorted(near.intersection(range(len(self.route)))) if body.signature else ()
        return next((at for at in places if verify(self.route[at].peer, statement, body.signature)), None)

    def _reported(self, body: Fault, claimant: int | None, *, by: int) -> PeerError:
        """Return the error for a report that hop `by` sent and hop `claimant` made; None if it is not known which hop made it."""
        route = self.route
        retry_s = (
            body.retry_s if claimant == body.index else min(body.retry_s, tolerances.LEAVING_S)
        )  # of its own time only
        refused = refusal(body.code, retry_s=retry_s, peer=route[body.index].peer)
        suspects = suspects_of(route, body.index, refused.code, claimant)
        return HopFault(refused, claimant=route[by if claimant is None else claimant].peer, suspects=suspects)

    async def _mend(self) -> None:
        while True:
            try:
                epoch, error = await asyncio.wait_for(self._faults.get(), self.config.progress_s)
            except asyncio.TimeoutError:
                if self.clock() - self._last_progress_s < self.config.progress_s or self._received.qsize():
                    continue
                epoch, error = self.epoch, PeerLost("no output although all links are alive")
            if epoch != self.epoch or self._complete:
                continue
            self.stats.reroutes += 1
            self.meter.reroutes[error.code] += 1
            try:
                self._judge(error)
                await self._bind(error)
            except SwarmnodeError as failure:
                if error.code == ErrorCode.DRAINING and isinstance(failure, NoRoute):
                    continue  # no peer can take over, and the leaving hop still serves
                self._received.put_nowait(failure)
                return

    def _judge(self, error: PeerError) -> None:
        """Leave out the hop that `error` names for a while, or those that may be at fault, and take a new session id if needed.

        Raises PeerRefused if the request itself fails, or if too few peers are there to tell; NoRoute if hops are lost again and
        again.
        """
        hop = next((hop for hop in self.route if hop.peer == error.peer), None)
        if hop is None:
            self._blame.leave_out(self.route)
            return
        code = ErrorCode(error.code)
        if code == ErrorCode.STALE or self._tainted:
            # A peer of an earlier route has moved this session to a newer epoch, or hops hold positions that the client
            # did not send: take a new session id.
            self._tainted = False
            self.id = secrets.token_bytes(SESSION_ID_BYTES)
            self.trace_id = trace_id(self.id)
        if code == ErrorCode.DRAINING and self.spec.mode == Mode.RING:
            self._leaving[hop.peer], self._left_in = hop, self.epoch
        else:  # whatever failed: the text is sent again
            self._leaving.clear()
        self.stats.faults.append((hop.peer, code.name))
        self._log.info("session %s: peer %s: %s", self.trace_id.hex()[:8], hop.peer, error)
        suspects = error.suspects if isinstance(error, HopFault) else ()
        verdict = self._blame.judge(hop, code, retry_s=getattr(error, "retry_s", None) or 0.0, suspects=suspects)
        if verdict is Verdict.PEER:
            self.router.suspect(hop.peer, code.name)
        elif code == ErrorCode.PEER_LOST:
            self.switchboard.check(hop.peer)  # the word of another hop is not enough to suspect it in other sessions
        if verdict is Verdict.REQUEST:
            text = f"the request fails wherever it is computed; lately {error}"
            raise PeerRefused(text, code=code, peer=hop.peer)
        if verdict is Verdict.UNDECIDED:
            text = f"the request fails again and again, and too few machines are there to tell why; lately {error}"
            raise PeerRefused(text, code=code, peer=hop.peer) if code in FINAL else NoRoute(text)

    async def _bind(self, error: SwarmnodeError | None = None) -> None:
        """Open the next epoch along the best route, trying others while peers fail, as long as the patience lasts.

        `error` is the reason for a new epoch. Raises NoRoute or Busy if no route could be opened, PeerRefused if the
        request itself fails.
        """
        deadline_s = self.clock() + self.config.patience_s
        while True:
            now_s = self.clock()
            try:
                self.route = self._blame.best_route(lambda avoid: self.router.route(avoid, self.route, self.spec.size))
            except NoRoute as failure:
                reason = self._why(error, failure)
                if now_s >= deadline_s or reason.code in FINAL:
                    raise reason from None
                await self._blame.wait(self.router.changed(), min(deadline_s - now_s, 1.0))
                continue
            try:
                # Stop at the first reported fault: a hop may notice earlier than this client that another hop is gone.
                opening = self._tasks.spawn(self._open(), "open", awaited=True)
                faulty = self._tasks.spawn(self._next_fault(), "hear of faults", awaited=True)
                try:
                    await asyncio.wait([opening, faulty], return_when=asyncio.FIRST_COMPLETED)
                    if faulty.done():  # though the epoch may be open by now: `_mend` does not hear of this fault again
                        raise faulty.result()
                    opening.result()
                finally:
                    await cancel_and_wait(opening, faulty)
                return
            except PeerError as failure:
                error = failure
                if error.peer is None:
                    error.peer = self.route[0].peer
                self._judge(error)
            if self.clock() >= deadline_s:
                raise NoRoute(f"no route through the swarm for {self.config.patience_s:.0f} s; the last error: {error}")

    async def _next_fault(self) -> PeerError:
        """Wait for a fault of the current epoch and return its error."""
        while True:
            epoch, error = await self._faults.get()
            if epoch == self.epoch:
                return error

    @staticmethod
    def _why(error: SwarmnodeError | None, no_route: NoRoute) -> SwarmnodeError:
        """Return the error to show if no route is left: Busy if peers are full, a refusal in `TOLD`, else `no_route`, with the loss
        of a peer behind it."""
        if isinstance(error, PeerRefused) and error.code == ErrorCode.BUSY:
            retry_s = error.retry_s or 1.0
            return Busy(f"the swarm is full at the moment; try again in {retry_s:.0f} s", retry_s=retry_s)
        told = isinstance(error, Busy) or (isinstance(error, PeerRefused) and error.code in TOLD)
        if isinstance(error, PeerLost):
            return NoRoute(f"{no_route}; the last error: {error}")
        return error if told and error is not None else no_route

    async def _open(self) -> None:
        if self._complete:  # the last output came while a route was looked for
            return
        self.epoch, self.received_end = self.epoch + 1, self._expected
        spec = self.spec
        branch, self._branch = self._branch, None
        leaving = tuple(self._leaving.values())[-MAX_LEAVING:]
        self._may_take_over |= {
            hop for hop in self.route for left in leaving if left.start <= hop.start < hop.end <= left.end
        }
        is_guessed = spec.proposer and spec.mode == Mode.RING
        drafts = min(self.router.drafts(self.route), MAX_DRAFTS) if is_guessed else 0
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
            known=self.received_end,
            truncate=self._truncate,
            codecs=self._codecs.link_codecs,
            adapts=spec.adapts,
            adapter=spec.adapter,
            branch=branch,
            drafts=drafts,
            proposer=spec.proposer if drafts else "",
            leaving=leaving,
        )
        if spec.adapter:
            opened = await self.with_adapter(opened)
        if self._last is not None:
            self._last.close()
            self._last = None
        ring, observed_latency = spec.mode == Mode.RING, self.router.observed_latency
        self._timing = Timing(self.route, -1, observed_latency, self.clock, ring=ring)
        is_timed = (
            ring and len(self.route) == 1 and not drafts
        )  # with guesses the rate of tokens is not the hop's speed
        self._cadence = Cadence(self.route[0], observed_latency, self.clock) if is_timed else None
        try:
            await self._first.open(self.route[0].peer, opened, spec.text(self._drawn))
            index = len(self.route) - 1
            epoch = self.epoch
            self._last = await self.switchboard.call(
                self.route[index].peer, self._from_last, lambda error: self._fault(epoch, error)
            )
            self._last.send(Attach(self.id, self.epoch, start=self._expected))
            self._log.info("opened %r", self)
        except NetworkDown as error:
            raise PeerLost(str(error), peer=self.route[0].peer) from error
