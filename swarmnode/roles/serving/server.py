"""The serving role of a node: takes sessions in, refuses what it cannot hold, and lets them go when it drains."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Sequence

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Attach, Body, Error, Hello, Open
from swarmnode.codec.trace_messages import trace_id
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.config import ServerConfig
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.errors import Busy, ErrorCode, PeerError, ProtocolError
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import Buffer, Network, PeerId
from swarmnode.net.limits.address_group import Claimant, owner_of
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.roles.credit.completed_work import CompletedWork
from swarmnode.roles.measuring.meters import cause_of
from swarmnode.roles.measuring.observed_latency import ObservedLatency
from swarmnode.roles.measuring.trace_log import SessionTrace, TraceLog
from swarmnode.roles.measuring.trace_server import trace_server
from swarmnode.roles.serving.adapters import StageAdapters
from swarmnode.roles.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.roles.serving.early_attaches import EarlyAttaches
from swarmnode.roles.serving.grammars import Grammars
from swarmnode.roles.serving.job import Job, Pass
from swarmnode.roles.serving.link_codecs import CodecRules
from swarmnode.roles.serving.opened import (
    check_sampling,
    draws_by_grammar,
    is_for,
    shape_of,
    text_of,
    units_of,
)
from swarmnode.roles.serving.pipeline import Pipeline
from swarmnode.roles.serving.replicas import Replicas
from swarmnode.roles.serving.session import StageSession
from swarmnode.roles.serving.session_host import HostedSession

WATCH_S = 0.5

log = logging.getLogger(__name__)


class StageServer:
    """Serves one span of units to the sessions of others.

    Shared state changes without an await in between, so a frame is always handled against a whole picture.
    """

    def __init__(
        self,
        network: Network,
        hello: Hello,
        pipelines: Sequence[Pipeline],
        config: ServerConfig,
        link_config: LinkConfig,
        observed_latency: ObservedLatency | None = None,
        *,
        completed: CompletedWork | None = None,
        weight_of: Callable[[PeerId], float] = lambda _client: 1.0,
        on_neighbour_lost: Callable[[PeerError], None] = lambda _error: None,
        decisions: DecisionLog | None = None,
        grammars: Grammars | None = None,
        adapters: StageAdapters | None = None,
        codec_rules: CodecRules = CodecRules(),
    ) -> None:
        """`pipelines` are the replicas of one span. `grammars` where tokens are drawn here, by a checkpoint with a tokenizer;
        `adapters` where the swarm has any."""
        self.config, self.codec_rules = config, codec_rules
        self._grammars, self._adapters = grammars, adapters
        self._tasks = Tasks("stage server", on_crash=None)
        self._decisions = decisions or DecisionLog()
        self._network = network
        self._sessions: dict[bytes, StageSession] = {}
        self._replicas = Replicas(pipelines, self._sessions, config, adapters)
        self._early = EarlyAttaches(config)
        self._keys = itertools.count()
        self._refusals: Counter[ErrorCode] = Counter()
        self._watching: asyncio.TimerHandle | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.switchboard = Switchboard(
            network, SESSION_PROTOCOL, hello, link_config, accept=self._accept, on_peer_lost=on_neighbour_lost
        )
        self.hidden_size = self._replicas.hidden_size
        self.orphan_grace_s = config.orphan_grace_s
        self.observed_latency = observed_latency or ObservedLatency()
        self._completed = completed or CompletedWork()
        self._weight_of = weight_of
        self.clock = self._replicas.clock  # on which what its jobs take is told, too
        self.pass_cost = self._replicas.pass_cost
        self._traces = TraceLog()  # of sessions that are over
        self._trace_server = trace_server(network, hello, link_config, self.trace)

    def __repr__(self) -> str:
        state = "draining" if self.draining else "serving"
        return f"<StageServer {state} {self.load} sessions with {self._replicas!r}>"

    @property
    def load(self) -> int:
        """Number of sessions held, but for those that are kept."""
        return sum(not session.kept for session in self._sessions.values())

    def readings(self) -> Readings:
        """What the sessions do here and take, and what was refused."""
        span = f"{self._replicas.span.start}:{self._replicas.span.end}"
        yield from self._replicas.readings()
        yield Reading(table.SESSIONS, self.load, (span,))
        for code in ErrorCode:
            yield Reading(table.REFUSALS, self._refusals[code], (span, cause_of(code)))

    def session(self, session: bytes) -> StageSession | None:
        """The session with this id, while it lasts."""
        return self._sessions.get(session)

    def trace(self, trace: bytes) -> SessionTrace | None:
        """Where the time of the session with this trace id went here, while it runs and for a while after; None where nothing is
        known of it."""
        running = (session.trace for session in self._sessions.values() if session.trace_id == trace)
        return next(running, None) or self._traces.get(trace)

    async def start(self) -> None:
        """Answer incoming links from now on."""
        await self.switchboard.start()
        await self._trace_server.start()

    def _kept(self) -> list[StageSession]:
        """Sessions that are kept for another text."""
        return [session for session in self._sessions.values() if session.kept]

    async def drain(self, timeout_s: float) -> None:
        """Take nothing new, ask the clients to move, and wait for them, at most `timeout_s` seconds."""
        self._stop_taking()
        for session in list(self._sessions.values()):
            session.drain()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            log.warning("left with %d sessions that had not moved in time", self.load)

    async def finish(self) -> None:
        """Take nothing new, and wait until the last session has ended."""
        self._stop_taking()
        await self._idle.wait()

    def _stop_taking(self) -> None:
        self.draining = True
        for session in self._kept():
            session.free()

    def take_on(self) -> None:
        """Take sessions again, after all."""
        self.draining = False

    async def close(self) -> None:
        """Free all sessions and end all links."""
        for timer in (self._watching, self._sweeping):
            if timer is not None:
                timer.cancel()
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await self._tasks.close()
        if self._grammars is not None:
            self._grammars.close()
        if self._adapters is not None:
            await self._adapters.close()
        await self._trace_server.close()
        await self.switchboard.close()

    # -- what sessions need

    def submit(self, job: Job) -> None:
        """Have the replica that holds the job's session compute it."""
        if self._watching is None:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._look_at_computing)
        self._replicas.of(job.session).submit(job, self._loop_s())

    def computed(self, session: HostedSession, job: Job, run: Pass) -> None:
        """A job came back from the compute thread."""
        start, end = units_of(session.opened)
        self._completed.note(session.id, (end - start) * session.opened.rows * job.count)
        watch = self._replicas.of(job.session).watch
        watch.computed(job.session, job.end, job.count, run.ended_s - run.began_s, self._loop_s())

    def _look_at_computing(self) -> None:
        self._watching = None
        for pipeline in self._replicas.stalled:
            log.error("computing stands still: %r", pipeline)
            waiting = pipeline.watch.waiting
            for session in [session for session in self._sessions.values() if session.key in waiting]:
                session.give_up(ErrorCode.PEER_LOST)
        if self._replicas.waiting:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._look_at_computing)

    def _sweep_soon(self) -> None:
        if self._sweeping is None and self._sessions:
            self._sweeping = asyncio.get_running_loop().call_later(self.config.forgotten_s / 4, self._sweep)

    def _sweep(self) -> None:
        """End the sessions that nobody has used for long."""
        self._sweeping, since_s = None, self._loop_s() - self.config.forgotten_s
        for session in [session for session in self._sessions.values() if session.moved_s <= since_s]:
            session.give_up(ErrorCode.BUSY, retry_s=self.config.retry_s)
        self._sweep_soon()

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()

    def note_fault(self, code: ErrorCode) -> None:
        """A session told its client that a hop fails."""
        self._replicas.meter.faults[code] += 1

    def freed(self, session: HostedSession) -> None:
        """A session gives back its place."""
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
            self._traces.keep(session.trace_id, session.trace)
            self._replicas.of(session.key).forget(session.key)
            self._leave_adapter(session.key)
        if not self._sessions:
            self._idle.set()

    # -- incoming conversations

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if isinstance(body, Open) and self._needs_more(body):
            self._tasks.spawn(self._open_with_more(channel, body, frame.payload), "open with a grammar or an adapter")
        elif isinstance(body, Open):
            self._tell_refusal(channel, body, self._open(channel, body, frame.payload))
        elif isinstance(body, Attach):
            self._attach(channel, body)
        else:
            channel.close(Error(ErrorCode.MALFORMED))

    def _needs_more(self, body: Open) -> bool:
        """Whether a session cannot be opened at once: for want of its grammar, or of its adapter."""
        lacks_grammar = draws_by_grammar(body) and body.session not in self._sessions
        return lacks_grammar or not self._has_adapter(body)

    def _leave_adapter(self, key: int) -> None:
        if self._adapters is not None:
            self._adapters.leave(key)

    def _has_adapter(self, body: Open) -> bool:
        return not body.adapter or (self._adapters is not None and body.adapter in self._adapters)

    async def _open_with_more(self, channel: Channel, body: Open, text: Buffer) -> None:
        """Compile the grammar beside the loop first, and bring the adapter."""
        grammar = None
        try:
            if draws_by_grammar(body) and body.session not in self._sessions:
                assert body.sampling is not None and body.sampling.grammar is not None
                if self._grammars is None:
                    raise ProtocolError("there is no tokenizer here", code=ErrorCode.INVALID_REQUEST)
                grammar = await self._grammars.compile(body.sampling.grammar)
            if body.adapter:
                if self._adapters is None:
                    raise ProtocolError("the swarm has no adapters", code=ErrorCode.INVALID_REQUEST)
                await self._adapters.bring(body.adapter)
        except ProtocolError as error:
            self._tell_refusal(channel, body, Error(error.code))
        except Busy as error:
            self._tell_refusal(channel, body, Error(error.code, retry_s=error.retry_s))
        else:
            if channel.open:  # who asked may be gone
                self._tell_refusal(channel, body, self._open(channel, body, text, grammar))

    def _tell_refusal(self, channel: Channel, body: Open, refusal: Error | None) -> None:
        """Where there is one."""
        if refusal is None:
            return
        code, trace = ErrorCode(refusal.code), trace_id(body.session).hex()
        log.info("session %s refused: %s", trace[:8], code.name, extra={"trace": trace})
        self._refusals[code] += 1
        self._note(f"refuses a session: {code.name}", channel.peer, body)
        channel.close(refusal)

    def _open(self, channel: Channel, body: Open, text: Buffer, grammar: GrammarMatcher | None = None) -> Error | None:
        """Bind a session to this channel, or say why not. `text` came with it, `grammar` is what its tokens must follow."""
        if not is_for(body, self._network.peer_id, channel.peer):
            return Error(ErrorCode.MALFORMED)
        hop = body.route[body.index]
        if not self._replicas.span.start <= hop.start < hop.end <= self._replicas.span.end:
            return Error(ErrorCode.WRONG_SPAN)
        wrong = check_sampling(body, text, self._replicas.vocab_size) or self.codec_rules.refusal(body)
        if wrong is not None:
            return Error(wrong)
        if not self._has_adapter(body):  # it has gone again, while the session waited for it
            return Error(ErrorCode.BUSY, retry_s=self.config.retry_s)
        session = self._sessions.get(body.session)
        if session is not None and body.epoch <= session.epoch:
            return Error(ErrorCode.STALE)
        if session is not None and shape_of(body) != shape_of(session.opened):
            session.free()
            session = None
        if session is not None and text_of(body) != text_of(session.opened):
            session.kept = False  # it does not make room for itself
            refusal = self._admit(session.key, channel.claimant, body)
            if refusal is not None:
                session.free()
                return refusal
        if session is None:
            session, source = StageSession(self, body, next(self._keys), grammar), self._source_of(body)
            if self._adapters is not None:
                self._adapters.use(body.adapter, session.key)  # or it might make room for its own session
            refusal = self._admit(session.key, channel.claimant, body, beside=source)
            if refusal is not None:
                self._leave_adapter(session.key)
                return refusal
            if source is not None and body.branch is not None:
                self._begin_as(source, session, body.branch.length)
            self._sessions[body.session] = session
            self._note("takes a session", channel.peer, body)
            self._idle.clear()
            self._sweep_soon()
        session.rebind(channel, body, text)
        for early, attach in self._early.take(body.session):
            self._attach(early, attach)
        return None

    def _source_of(self, body: Open) -> StageSession | None:
        """The session that a new one begins as, if it is here."""
        if body.branch is None or body.truncate is not None:
            return None
        alike = (one for one in self._sessions.values() if shape_of(one.opened) == shape_of(body))
        return next((one for one in alike if one.is_source_of(body)), None)

    def _begin_as(self, source: StageSession, session: StageSession, length: int) -> None:
        """Let a session that was let in have what is here of its source, which may have given its room for it."""
        pipeline, length = self._replicas.of(session.key), min(length, source.computed)
        if pipeline.keeps(source.key, source.cursor.accepted, length) and (begun := session.begin_as(source, length)):
            pipeline.fork(source.key, session.key, begun)

    def _note(self, what: str, sender: PeerId, body: Open) -> None:
        """Write down what was decided of a session, on the memory and the work that there were."""
        facts = (
            f"it asks for {body.rows} rows of {body.max_length} positions, place {body.index} of {len(body.route)}",
            f"here are units {self._replicas.span.start} to {self._replicas.span.end - 1}",
            *self._replicas.describe(body),
            f"{self.load} sessions are held, {len(self._replicas.idle)} of them without input for {self.config.idle_s:g} s",
            "this node takes nothing new" if self.draining else "this node takes sessions",
            "computing stands still" if self._replicas.stalled else "computing goes on",
        )
        about = (sender, trace_id(body.session).hex())
        self._decisions.note(Topic.ADMISSION, what, facts, about=about, units=self._replicas.span)

    def _admit(self, key: int, claimant: Claimant, body: Open, *, beside: StageSession | None = None) -> Error | None:
        """Reserve memory for a new session, `beside` another one where that can be, or for one that gets another text: it can then
        never fail half-way for want of it."""
        if self.draining:
            return Error(ErrorCode.DRAINING)
        limit = self._replicas.position_limit
        if limit is not None and body.max_length > limit:
            return Error(ErrorCode.INVALID_REQUEST)
        pipeline = self._replicas.reserve(key, claimant, body, beside=None if beside is None else beside.key)
        if isinstance(pipeline, ErrorCode):
            return Error(pipeline, retry_s=self.config.retry_s if pipeline == ErrorCode.BUSY else 0.0)
        if key in pipeline:
            pipeline.extend(key, body.max_length)
            return None
        start, end = units_of(body)
        pipeline.open(
            key,
            start=start,
            end=end,
            rows=body.rows,
            max_length=body.max_length,
            padding=body.padding,
            adapter=body.adapter,
            owner=owner_of(claimant) if body.index == 0 else "",  # for whom it is only the first hop knows
            weight=self._weight_of(claimant.peer),
        )
        return None

    @property
    def free_cache_tokens(self) -> int:
        """Positions that a new session may have."""
        return self._replicas.free_cache_tokens

    def _attach(self, channel: Channel, body: Attach) -> None:
        session = self._sessions.get(body.session)
        if session is not None and session.epoch == body.epoch:
            session.attach(channel, body.start)
        elif session is not None and session.epoch > body.epoch:
            channel.close(Error(ErrorCode.STALE))
        else:
            self._early.keep(channel, body)
