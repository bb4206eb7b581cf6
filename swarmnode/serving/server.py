"""Stage server: admits sessions, refuses sessions that it cannot hold, and lets them go if the node drains."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

from swarmnode.codec.body import Body, HopSpec
from swarmnode.codec.frames import MAX_PAYLOAD_BYTES, Frame
from swarmnode.codec.handover_messages import HANDOVER_PROTOCOL, CacheReply, GetCache
from swarmnode.codec.measuring_messages import trace_id
from swarmnode.codec.messages import Attach, Error, Mode, Open
from swarmnode.codec.sampling import ID_BYTES
from swarmnode.codec.tensors import DTYPE_BYTES
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.compute.serving.states import SessionCopy
from swarmnode.config import ServerConfig
from swarmnode.counting import counted
from swarmnode.decisions import Topic
from swarmnode.errors import Busy, ErrorCode, NetworkDown, PeerError, ProtocolError
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.measuring.meters import RefusalMeter
from swarmnode.measuring.trace import SESSIONS, SessionTrace, trace_server
from swarmnode.metrics.metric import Readings
from swarmnode.net.addressing.addresses import Claimant, owner_of
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.questions import Answer, LocalPeer, QuestionServer, ask_one, board_of
from swarmnode.plan.compression import takes_over
from swarmnode.plan.view import Span
from swarmnode.serving.client.client_session import SESSION_PROTOCOL
from swarmnode.serving.drafting.drafter import Drafting, no_drafting
from swarmnode.serving.link_codecs import CodecRules
from swarmnode.serving.pipeline import GiveWay, Pipeline, Replicas
from swarmnode.serving.served_adapters import Grammars, StageAdapters
from swarmnode.serving.session.opening import (
    EarlyAttaches,
    check_sampling,
    draws_by_grammar,
    is_for,
    kinds_of,
    pack_copy,
    shape_of,
    text_of,
    units_of,
    unpack_copy,
)
from swarmnode.serving.session.session import StageSession

WATCH_S = 0.5  # between two checks of the sessions
TAKE_OVER_S = 1.5  # for a cache from a hop that leaves; the hop before waits 2 s for READY (`links/hop.py`)
MOST_TAKEN_OVER = 4  # caches on their way here at once
MOST_HANDED_OVER = 8  # copies of one session that a leaving node gives: several hops may share its layers
WOULD_HELP = {
    ErrorCode.BUSY: "it takes more when a text here ends, or with more memory (--memory)",
    ErrorCode.TOO_LARGE: "texts of this length need more memory (--memory)",
    ErrorCode.DRAINING: "it takes texts again after the pause",
    ErrorCode.WRONG_SPAN: "it has moved; the other machine learns its layers from its next announcement",
}

log = logging.getLogger(__name__)


@dataclass(eq=False)
class StageServer:
    """Server of one span of layers for the sessions of other peers. `pipelines` are the span's replicas.

    Shared state changes without an await in between, so every frame meets a consistent state.
    """

    peer: LocalPeer
    pipelines: Sequence[Pipeline]
    config: ServerConfig
    _: KW_ONLY
    grammars: Grammars
    adapters: StageAdapters
    codec_rules: CodecRules = field(default_factory=CodecRules)
    drafting: Drafting = no_drafting

    def __post_init__(self) -> None:
        self.draining = False
        self.is_behind: Callable[[], bool] = lambda: False  # the weights are not yet those that the swarm has learnt
        self._tasks = Tasks("stage server", on_crash=None)
        self._sessions: dict[bytes, StageSession] = {}
        self.adapters.end_sessions = self._end_adapter
        self._replicas = Replicas(self.pipelines, self._sessions, self.config, self.adapters)
        self.meter = self._replicas.meter
        self._early = EarlyAttaches(self.config)
        self._keys = itertools.count()
        self._refusals = RefusalMeter(self._replicas.span)
        self._watching: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.switchboard = board_of(
            self.peer, SESSION_PROTOCOL, accept=self._accept, on_peer_lost=self.peer.lost_neighbour
        )
        self._traces: Recent[bytes, SessionTrace] = Recent(SESSIONS)  # of the sessions that ended last
        self._trace_server = trace_server(self.peer, self.trace)
        self._handover_server = QuestionServer(self.peer, HANDOVER_PROTOCOL, GetCache, self._hand_over)
        self._handed_over: Counter[bytes] = Counter()  # copies that were given, by session
        self._taking_over = 0  # caches that are on their way here

    def __repr__(self) -> str:
        state = "draining" if self.draining else "serving"
        return f"<StageServer {state} {self.load} sessions with {self._replicas!r}>"

    def share_memory(self, give_way: GiveWay) -> None:
        """Have `give_way` make room for sessions that find no memory."""
        self._replicas.give_way_beside = give_way

    @property
    def load(self) -> int:
        """Number of sessions in use: those held, without idle ones that are kept to begin another text."""
        return sum(not session.retained for session in self._sessions.values())

    @property
    def row_load(self) -> float:
        """Share of the time that rows of all sessions take on the busiest device, between 0 and 1."""
        workers = (worker for pipeline in self.pipelines for worker in pipeline.workers)
        return max(worker.row_load.share(worker.clock()) for worker in workers)

    def readings(self) -> Readings:
        """Yield the metrics of devices, sessions and refusals."""
        yield from self._replicas.readings()
        yield from self._refusals.readings(self.load)

    def session(self, session: bytes) -> StageSession | None:
        """Return the session with this id; None if it is not here."""
        return self._sessions.get(session)

    def trace(self, trace: bytes) -> SessionTrace | None:
        """Return the times of the session with this trace id at this hop, while it runs and for a while after; None if
        it is unknown."""
        running = (session.trace for session in self._sessions.values() if session.trace_id == trace)
        return next(running, None) or self._traces.get(trace)

    async def start(self) -> None:
        """Start to accept sessions of other peers."""
        await self.switchboard.start()
        await self._trace_server.start()
        await self._handover_server.start()

    async def drain(self, timeout_s: float) -> None:
        """Take no new sessions, ask the clients to move theirs, and wait for that, at most `timeout_s` seconds."""
        self._stop_taking()
        for session in list(self._sessions.values()):
            session.drain()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except asyncio.TimeoutError:
            log.warning("%d sessions did not move to other peers in time: they end now", self.load)

    async def finish(self) -> None:
        """Take no new sessions, and wait until the last session has ended."""
        self._stop_taking()
        await self._idle.wait()

    def _stop_taking(self) -> None:
        self.draining = True
        for session in [session for session in self._sessions.values() if session.retained]:
            session.free()

    def reopen(self) -> None:
        """Accept new sessions again after draining."""
        self.draining = False

    async def close(self) -> None:
        """Free all sessions and end all links."""
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await self._tasks.close()
        self.grammars.close()
        await self.adapters.close()
        await self._trace_server.close()
        await self._handover_server.close()
        await self.switchboard.close()

    # -- services for sessions

    def freed(self, session: bytes) -> None:
        """Drop a session whose memory is free; see `SessionHost.freed`."""
        gone = self._sessions.pop(session)
        self._handed_over.pop(session, None)
        self._traces[gone.trace_id] = gone.trace
        self._replicas.of(gone.key).forget(gone.key)
        self.adapters.leave(gone.key)
        if not self._sessions:
            self._idle.set()

    def _end_adapter(self, name: str, code: ErrorCode) -> None:
        """End the sessions of an adapter with `code`."""
        for session in [session for session in self._sessions.values() if session.opened.adapter == name]:
            session.give_up(code)

    def _watch(self) -> None:
        """Check the sessions from time to time, while there are any."""
        if self._watching is None and self._sessions:
            self._watching = asyncio.get_running_loop().call_later(WATCH_S, self._expire_sessions)

    def _expire_sessions(self) -> None:
        """End sessions that wait for a stalled device, and sessions that were unused for `forgotten_s`."""
        self._watching, since_s = None, asyncio.get_running_loop().time() - self.config.forgotten_s
        for pipeline in self._replicas.stalled:
            log.error("computing has stalled: %r", pipeline)
            for session in [session for session in self._sessions.values() if session.key in pipeline.watch.waiting]:
                session.give_up(ErrorCode.PEER_LOST)
        for session in [session for session in self._sessions.values() if session.moved_s <= since_s]:
            session.give_up(ErrorCode.BUSY, retry_s=self.config.retry_s)
        self._watch()

    # -- incoming conversations

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if isinstance(body, Open) and self._needs_more(body):
            self._tasks.spawn(self._open_with_more(channel, body, frame.payload), "open with a grammar or an adapter")
        elif isinstance(body, Open):
            with self._refusing(channel, body):
                self._open(channel, body, frame.payload)
        elif isinstance(body, Attach):
            self._attach(channel, body)
        else:
            channel.close(Error(ErrorCode.MALFORMED))

    def _needs_more(self, body: Open) -> bool:
        """Return whether a grammar must be compiled, an adapter loaded or a cache fetched before the session can open."""
        lacks_grammar = draws_by_grammar(body) and body.session not in self._sessions
        return lacks_grammar or not self._has_adapter(body) or self._predecessor(body) is not None

    def _has_adapter(self, body: Open) -> bool:
        return not body.adapter or body.adapter in self.adapters

    async def _open_with_more(self, channel: Channel, body: Open, text: Buffer) -> None:
        """Compile the grammar, load the adapter and fetch the cache first, without blocking the loop."""
        grammar = None
        with self._refusing(channel, body):
            if draws_by_grammar(body) and body.session not in self._sessions:
                assert body.sampling is not None and body.sampling.grammar is not None
                grammar = await self.grammars.compile(body.sampling.grammar)
            if body.adapter:
                self.adapters.admit(body, channel.peer)
                await self.adapters.bring(body.adapter)
            copy = await self._take_over(body, channel.peer)
            if channel.open:  # the sender may be gone
                self._open(channel, body, text, grammar, copy)

    @contextlib.contextmanager
    def _refusing(self, channel: Channel, body: Open) -> Iterator[None]:
        """Answer the OPEN of a session with an error code if the `with` block raises ProtocolError or Busy."""
        try:
            yield
        except (ProtocolError, Busy) as error:
            code, trace = ErrorCode(error.code), trace_id(body.session).hex()
            log.info("session %s refused: %s", trace[:8], code.name, extra={"trace": trace})
            self._record(f"refuses a text: {error}", channel.peer, body, WOULD_HELP.get(code))
            self._refusals.refuse(channel, Error(code, error.retry_s if isinstance(error, Busy) else 0.0))

    def _open(
        self,
        channel: Channel,
        body: Open,
        text: Buffer,
        grammar: GrammarMatcher | None = None,
        copy: SessionCopy | None = None,
    ) -> None:
        """Bind a session to this channel: a new one, or one that is open here and comes by another way. `text` came with its OPEN:
        the ids of the tokens that penalties count. `grammar` constrains its tokens. A new one begins with `copy`.

        Raises ProtocolError if the session cannot be had here, Busy if there is no room or its adapter has gone again.
        """
        if not is_for(body, self.peer.network.peer_id, channel.peer):
            raise ProtocolError("the route does not lead here from the sender")
        hop, span = body.route[body.index], self._replicas.span
        if not span.start <= hop.start < hop.end <= span.end:
            raise ProtocolError("its layers are not here", code=ErrorCode.WRONG_SPAN)
        wrong = check_sampling(body, text, self._replicas.vocab_size) or self.codec_rules.refusal(body)
        if wrong is not None:
            raise ProtocolError("it does not fit the model, or the swarm's codecs", code=wrong)
        self.adapters.admit(body, channel.peer)
        if not self._has_adapter(body):
            raise Busy("the adapter has gone again", retry_s=self.config.retry_s)
        session = self._sessions.get(body.session)
        if session is not None and body.epoch <= session.epoch:
            raise ProtocolError("another request for it came later", code=ErrorCode.STALE)
        if session is not None and (shape_of(body) != shape_of(session.opened) or session.must_begin_anew(body)):
            session.free()
            session = None
        if session is None:
            session = self._new_session(channel.claimant, body, grammar, copy)
            self._record("takes a text", channel.peer, body)
        elif text_of(body) != text_of(session.opened):
            session.retained = False  # it does not make room for itself
            try:
                self._admit(session.key, channel.claimant, body)
            except (ProtocolError, Busy):
                session.free()
                raise
        session.rebind(channel, body, text)
        for early, attach in self._early.pop_attaches(body.session):
            self._attach(early, attach)

    def _new_session(
        self, claimant: Claimant, body: Open, grammar: GrammarMatcher | None, copy: SessionCopy | None
    ) -> StageSession:
        """Make a session, if possible in the pipeline of the session that it begins like. Raises as `_admit` does."""
        key, source = next(self._keys), self._source_of(body)
        self.adapters.use(body.adapter, key)  # else the adapter might be dropped to make room for its own session
        try:
            pipeline = self._admit(key, claimant, body, beside=None if source is None else source.key)
        except (ProtocolError, Busy):
            self.adapters.leave(key)
            raise
        session = self._sessions[body.session] = StageSession(self, pipeline, body, key, grammar)
        if body.index == 0:  # only the first hop knows the session's client
            self.peer.completed.begin(session.id, claimant.peer)
        if source is not None and body.branch is not None:
            _begin_as(source, session, body.branch.length, pipeline)
        elif copy is not None:
            session.take_over(copy.length)
            pipeline.copy_in(key, copy)
        self._idle.clear()
        self._watch()
        return session

    def _predecessor(self, body: Open) -> HopSpec | None:
        """Return the hop that leaves and whose cache of a session, new here, can take the place of its text; None if there is none,
        or if computing the text again is cheaper."""
        hop, most, pipeline = body.route[min(body.index, len(body.route) - 1)], body.known - 1, self.pipelines[0]
        is_new = body.session not in self._sessions and body.mode == Mode.RING and not self.draining and most > 0
        if not body.leaving or not is_new or self._taking_over >= MOST_TAKEN_OVER:
            return None
        units = Span(hop.start, hop.end)
        width_bytes = ID_BYTES if hop.start == 0 else pipeline.hidden_size * DTYPE_BYTES[self.codec_rules.dtype]
        sizes = pipeline.copy_bytes(units, most), most * width_bytes
        replay_s = sum(worker.scheduler.cost.seconds(most) for worker in pipeline.workers)
        if not takes_over(*sizes, replay_s, self.peer.link_config.link_statistics.down_bps, within_s=TAKE_OVER_S):
            return None
        return next((one for one in body.leaving if one.start <= hop.start < hop.end <= one.end), None)

    async def _take_over(self, body: Open, sender: PeerId) -> SessionCopy | None:
        """Fetch the cache of a session from the hop that leaves. None if there is no such hop, or no cache that fits comes in time:
        then the hop before sends the text."""
        if (predecessor := self._predecessor(body)) is None or not is_for(body, self.peer.network.peer_id, sender):
            return None
        units = Span(body.route[body.index].start, body.route[body.index].end)
        truncations = 0 if body.truncate is None else body.truncate.number
        question = GetCache(body.session, *units, body.known - 1, truncations, body.adapter)
        most_bytes = self.pipelines[0].copy_bytes(units, question.most)
        links = replace(self.peer.link_config, max_payload_bytes=min(most_bytes, MAX_PAYLOAD_BYTES))
        board = Switchboard(self.peer.network, HANDOVER_PROTOCOL, self.peer.hello, links)
        self._taking_over += 1
        try:
            asking = ask_one(board, predecessor.peer, question, CacheReply)
            reply, payload = await asyncio.wait_for(asking, TAKE_OVER_S)
            if reply.length > question.most:
                raise ProtocolError(f"it has {reply.length} positions; {question.most} are known")
            self.pipelines[0].check_copy(units, reply.length, kinds_of(reply))
            copy = await asyncio.to_thread(unpack_copy, reply, payload)
            log.info("session %s: takes over %d positions", trace_id(body.session).hex()[:8], copy.length)
            return copy
        except (PeerError, NetworkDown, asyncio.TimeoutError) as error:
            log.info("session %s: the text is computed again: %s", trace_id(body.session).hex()[:8], error)
            return None
        finally:
            self._taking_over -= 1
            await board.close()

    async def _hand_over(self, _asker: Claimant, question: GetCache) -> Answer:
        """Answer a hop that takes over a session, while this node drains."""
        session, units = self._sessions.get(question.session), Span(question.start, question.end)
        own = Span(0, 0) if session is None else Span(*units_of(session.opened))
        if (
            session is None
            or not self.draining
            or self._handed_over[question.session] >= MOST_HANDED_OVER
            or not own.start <= units.start < units.end <= own.end
            or (session.opened.mode, session.opened.adapter) != (Mode.RING, question.adapter)
            or session.cursor.truncations != question.truncations
        ):
            return Answer(Error(ErrorCode.NO_SESSION))
        self._handed_over[question.session] += 1
        most = min(question.most, session.cursor.sure, session.computed)
        copy = await self._replicas.of(session.key).copy_out(session.key, units, most)
        if copy is None:
            return Answer(Error(ErrorCode.NO_SESSION))
        return Answer(*await asyncio.to_thread(pack_copy, copy))

    def _source_of(self, body: Open) -> StageSession | None:
        """Return the session whose first positions a new one shares; None if it is not here."""
        if body.branch is None or body.truncate is not None:
            return None
        alike = (one for one in self._sessions.values() if shape_of(one.opened) == shape_of(body))
        return next((one for one in alike if one.is_source_of(body)), None)

    def _record(self, what: str, sender: PeerId, body: Open, would_help: str | None = None) -> None:
        """Log a decision about a session, with the memory and work at this moment."""
        idle = len(self._replicas.idle)
        facts = (
            f"{counted(body.rows, 'text')} of up to {body.max_length:,} tokens; machine {body.index + 1} of {len(body.route)}",
            *self._replicas.describe(body),
            f"{counted(self.load, 'text')} here, {idle} of them without a new token for {self.config.idle_s:g} s",
            *(["this node takes nothing new at the moment"] if self.draining else []),
            *(["its device does not answer"] if self._replicas.stalled else []),
            *([would_help] if would_help is not None else []),
        )
        about = (sender, trace_id(body.session).hex())
        self.peer.decisions.record(Topic.ADMISSION, what, facts, about=about, units=self._replicas.span)

    def _admit(self, key: int, claimant: Claimant, body: Open, *, beside: int | None = None) -> Pipeline:
        """Reserve memory for a new session, or for one that gets another text, so that it cannot run out of memory
        half-way.

        `beside` is a session whose pipeline is preferred. Raises ProtocolError if the session never fits or this node
        leaves, Busy if it does not fit now or the weights are not here yet.
        """
        if self.draining:
            raise ProtocolError("this node pauses or leaves", code=ErrorCode.DRAINING)
        if self.is_behind():
            raise Busy("this node is still catching up with the training", retry_s=self.config.retry_s)
        limit = self._replicas.position_limit
        if limit is not None and body.max_length > limit:
            raise ProtocolError(
                "the session asks for more positions than the model has", code=ErrorCode.INVALID_REQUEST
            )
        pipeline = self._replicas.reserve(key, claimant, body, beside=beside)
        if key in pipeline:
            pipeline.extend(key, body.max_length)
        else:
            owner = owner_of(claimant) if body.index == 0 else ""  # only the first hop knows the session's client
            pipeline.open(key, body, owner=owner, weight=self.peer.weight_of(claimant.peer))
        return pipeline

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
            self._early.store_attach(channel, body)


def _begin_as(source: StageSession, session: StageSession, length: int, pipeline: Pipeline) -> None:
    """Copy the positions of `source` that are still here into the newly admitted session: `source` may have been freed
    for it."""
    reach = partial(pipeline.reachable, source.key, source.cursor.accepted)
    if begun := session.begin_as(source, reach(min(length, source.computed)), reach):
        pipeline.fork(source.key, session.key, begun)
