"""A session at one hop of its route: positions come in from upstream, are computed, and go on to the next hop.

It is bound while an upstream channel of the current epoch brings inputs, and orphaned for a while after that channel is gone, until
a newer epoch binds it again. It is freed if it ends in order, is given up, or is orphaned for too long.

At the last hop results go to the subscribers. At the first hop in RING mode they come back as the next input.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from functools import partial

from msgspec.structs import replace

from swarmnode.codec.body import EPOCH_TURNS, Body
from swarmnode.codec.frames import Frame
from swarmnode.codec.handover_messages import TookOver
from swarmnode.codec.measuring_messages import Ran, trace_id
from swarmnode.codec.messages import (
    ANY_DRAFTS,
    Drafts,
    End,
    Error,
    Fault,
    Input,
    KeepCache,
    LinkCodec,
    Mode,
    Open,
    Output,
    ProposerKind,
    Ready,
    Truncate,
    Want,
    branch_proof,
)
from swarmnode.codec.tensors import TensorInfo
from swarmnode.compute.serving.grammar import GrammarMatcher
from swarmnode.errors import ErrorCode, NetworkDown, PeerError
from swarmnode.links.hop import Hop, JournalGap, until
from swarmnode.links.switchboard import Channel
from swarmnode.measuring.trace import SessionTrace
from swarmnode.net.interfaces import Buffer
from swarmnode.net.tasks import Tasks
from swarmnode.peer.paths import Timing
from swarmnode.serving.drafting.session_guesses import DraftLead, GuessedJobs, Retractions
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Pass, Return, Sample, entries_of
from swarmnode.serving.link_codecs import SessionCodecs
from swarmnode.serving.session.opening import (
    check_input,
    first_drawn,
    inputs_end,
    is_last,
    sampler_of,
    text_of,
    units_of,
)
from swarmnode.serving.session.session_host import SessionHost, SessionPipeline
from swarmnode.serving.session.session_streams import (
    InputCursor,
    OutputStream,
    Ring,
    Transcript,
    ids_in,
    ids_input,
    output_of,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class StageSession:
    """A session at one hop. Created for its first OPEN; `rebind` binds it to the epoch of each OPEN, the first included."""

    host: SessionHost
    pipeline: SessionPipeline
    opened: Open  # the OPEN of the current epoch
    key: int  # names the cache; a session that starts over gets a new key
    grammar: InitVar[GrammarMatcher | None] = None

    def __post_init__(self, grammar: GrammarMatcher | None) -> None:
        self.trace_id = trace_id(self.opened.session)
        self.cursor = InputCursor(self.opened.known)
        self._codecs = SessionCodecs(self.opened, self.host.codec_rules, self.pipeline.hidden_size)
        self._sampler = sampler_of(self.opened, grammar)
        self.moved_s = asyncio.get_running_loop().time()  # time of the last OPEN or input
        self._upstream: Channel | None = None
        self._downstream = Hop(self.host.switchboard, self._from_downstream, self._downstream_failed)
        self._output_stream = OutputStream()
        self._guessed_jobs = GuessedJobs(self._compute)  # at the last hop
        self._retractions = Retractions()
        self.lead: DraftLead | None = None  # at the first hop, if the client lets it guess
        self._feeding = False  # whether tokens are about to be taken as inputs
        self.transcript = Transcript(self._downstream, self._output_stream, keeps=self.opened.rows == 1)
        self._extended: Open | None = None  # the OPEN that the rest of the route is bound to
        self._ring = Ring(self.host.switchboard, self._from_ring, self._in_force)
        self._tasks = Tasks(f"session {self.trace_id.hex()[:8]}", on_crash=self._crashed)
        self._log = logging.LoggerAdapter(log, {"trace": self.trace_id.hex()})
        self._orphaned: asyncio.TimerHandle | None = None
        self._freed = False
        self.computed = 0  # positions whose outputs were sent on; more may be on their way through the device
        self.retained = False  # idle, kept for another text; freed if memory is needed
        self._answers = False  # whether the present text is counted as an answer
        self._timing = self._new_timing()
        self.trace = SessionTrace(*units_of(self.opened))

    def __repr__(self) -> str:
        state = "freed" if self._freed else "orphaned" if self._orphaned else "bound"
        return f"<StageSession {self.trace_id.hex()[:8]} at hop {self.opened.index} {state} {self.cursor!r}>"

    @property
    def id(self) -> bytes:
        """Session id: 16 bytes that all hops and the client know."""
        return self.opened.session

    @property
    def epoch(self) -> int:
        """Number of the client's present route for this session; it grows with each new route."""
        return self.opened.epoch

    def _new_timing(self) -> Timing:
        opened, latency = self.opened, self.host.peer.observed_latency
        return Timing(opened.route, opened.index, latency, self.pipeline.clock, ring=opened.mode == Mode.RING)

    @property
    def _feeds_itself(self) -> bool:
        return self.opened.index == 0 and self.opened.mode == Mode.RING

    def is_source_of(self, opened: Open) -> bool:
        """Return whether the branch of `opened` names this session, with its present text."""
        branch, own = opened.branch, (self.id, self.cursor.truncations)
        return branch is not None and branch.proof == branch_proof(*own, opened.session, branch.length)

    def begin_as(self, source: StageSession, length: int, reach: Callable[[int], int]) -> int:
        """Begin with the first `length` positions of `source`, which were computed here. Called before any input.

        Returns the number of positions taken; fewer than `length` if the source only guessed the last ones, if an entry
        that was sent on can only be sent again whole, or if `reach` returns fewer that can be copied. The transcript ends,
        because a text computed in two sessions is not audited.
        """
        length = min(length, source.cursor.sure)
        length = length if is_last(self.opened) else self._downstream.begin_as(source._downstream, length)
        self._begin_at(length := reach(length))
        if self.lead is not None and source.lead is not None:
            self.lead.share(source.lead, length)
        return length

    def take_over(self, length: int) -> None:
        """Begin with the first `length` positions, whose cache comes from a hop that leaves. Called before any input."""
        self.cursor.truncations = 0 if self.opened.truncate is None else self.opened.truncate.number
        self._downstream.begin_at(length, self.cursor.truncations)
        self._begin_at(length)

    def _begin_at(self, length: int) -> None:
        self.computed, _ = length, self.cursor.advance(length)
        self.transcript.end()  # a text that was computed in several places is not audited here
        if self.opened.index == 0:
            self.lead = self._new_lead(begin=length)

    def must_begin_anew(self, opened: Open) -> bool:
        """Return whether the next hop of `opened` is new and will need positions that are not in the journal."""
        after = opened.route[opened.index + 1 :]
        return bool(after) and not opened.leaving and self._downstream.lacks_for(after[0].peer)

    def _new_lead(self, *, begin: int) -> DraftLead | None:
        """Return the guesses of this session, which knows the text from position `begin` on; None if it shall not guess."""
        drafting = self.host.drafting(self.opened) if self._feeds_itself and self.opened.drafts else None
        if drafting is None:
            return None
        clock, counts = self.pipeline.clock, (self.host.meter.drafts, self.trace.drafts)
        lead = DraftLead(*drafting, most=self.opened.drafts, begin=begin, clock=clock, counts=counts)
        lead.listen(self._feed_soon)
        return lead

    def _end_lead(self) -> None:
        """Guess nothing any more, and free what the drafters hold."""
        if self.lead is not None:
            self.lead.close()
            self.lead = None

    # -- a new epoch

    def rebind(self, channel: Channel, opened: Open, text: Buffer = b"") -> None:
        """Take inputs from `channel` from now on, and bind the rest of the route. `text` came with the OPEN."""
        former, self.opened = self.opened, opened
        if self.retained or text_of(opened) != text_of(former):
            self._answers = False
        if opened.sampling != former.sampling:  # another text
            self._sampler = sampler_of(opened)
            self._output_stream.forget()
        self.retained = False
        if self._upstream is not None:
            self._upstream.close()
        if self._orphaned is not None:
            self._orphaned.cancel()
            self._orphaned = None
        self._upstream, self.cursor.received_end = channel, opened.known
        if opened.drafts or former.drafts:
            self._forget_guesses(former)
        if opened.truncate is not None:
            # The hop before sends the positions again that cannot stay.
            before, to = self.cursor.accepted, opened.truncate.to
            self._cut(opened.truncate, self.pipeline.reachable(self.key, before, to) if to < before else to)
        accepted = self.cursor.accepted
        self.moved_s = asyncio.get_running_loop().time()
        self.transcript.rebound(accepted)
        self._codecs.rebound(opened, accepted)
        self._timing = self._new_timing()
        channel.on_frame, channel.on_lost = self._from_upstream, self._upstream_lost
        channel.send(Ready(have=accepted))
        if self._downstream.begin:
            self._tell_client(TookOver(opened.index, self._downstream.begin))
        self._log.info("session %s: epoch %d begins at position %d", self.trace_id.hex()[:8], self.epoch, accepted)
        self._output_stream.close()
        self._ring.unbind()
        if self._sampler is not None:
            self._sampler.tell(text)
        if not is_last(opened):
            self._tasks.spawn(self._extend(opened, text), "extend the route")
            if self._feeds_itself:
                fail = partial(self._fault, len(opened.route) - 1)
                self._tasks.spawn(self._ring.bind(opened, lambda: self.cursor.accepted, fail), "close the ring")
        elif self._feeds_itself and (held := self._output_stream.held(accepted)) is not None:
            self._feed(accepted, held)  # it came while an older epoch was bound to another peer

    def _forget_guesses(self, former: Open) -> None:
        """Take back all guesses, as a new epoch begins: the hops of its route may hold different ones."""
        self._retract(self.opened.epoch * EPOCH_TURNS, self.cursor.sure)
        # A sure position may still wait to be computed where a wrong guess was: what the journal has of it is of that guess.
        self._downstream.settle(min(self.cursor.sure, self.computed))
        self._guessed_jobs.drop_from(self.cursor.sure)
        if self.lead is None or (former.drafts, former.proposer) != (self.opened.drafts, self.opened.proposer):
            self._end_lead()
            self.lead = self._new_lead(begin=self.cursor.sure)
        if self.lead is not None:
            self.lead.cut(self.cursor.sure)
            self.lead.pause()

    def _retract(self, turn: int, to: int) -> None:
        """Begin the newer turn `turn`: the guesses from position `to` on do not count any more."""
        back_to = self.cursor.begin_turn(turn, to)
        if back_to is not None:
            self._retractions.record(turn, back_to)
            self.transcript.retract(back_to)
            self.computed = min(self.computed, back_to)

    def _in_force(self, opened: Open) -> bool:
        """Return whether the session is alive and still at this OPEN: END may arrive at the same moment."""
        return opened is self.opened and not self._freed

    async def _extend(self, opened: Open, text: Buffer) -> None:
        if not self._in_force(opened):
            return
        peer = opened.route[opened.index + 1].peer
        try:
            forwarded = replace(opened, index=opened.index + 1)
            await self._downstream.open(peer, forwarded, text)
            self._extended = opened
        except (PeerError, NetworkDown) as error:
            if opened is self.opened and isinstance(error, JournalGap):
                self.give_up(ErrorCode.NO_SESSION)  # the hop before sends all of it again
            elif opened is self.opened:
                self._fault(opened.index + 1, error)

    def _from_upstream(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Input):
            if self.opened.drafts:
                self._retract(body.turn, frame.seq)
            code = self.host.codec_rules.wrong(body) or check_input(
                self.opened, body, frame.seq, self.cursor.accepted, self.pipeline.hidden_size
            )
            if code is None:
                end = frame.seq + body.tensor.shape[1]
                skip = self.cursor.accepted - frame.seq
                if skip >= body.tensor.shape[1] or (self.lead is not None and frame.seq >= first_drawn(self.opened)):
                    return  # tokens drawn in this epoch come round the ring
                want = Want(body.want) if end >= self.cursor.received_end else Want.NOTHING
                if self.lead is not None and (ids := ids_in(body.tensor, frame.payload)) is not None:
                    self.lead.know(ids[skip:])
                else:
                    self._end_lead()  # the worker refuses the input
                order = body.reorder if not skip else ()
                self._submit(end, ((body.tensor, frame.payload),), want, order, skip, guessed=body.guessed)
                self._feed_what_waits()
            else:
                self._refuse(code)
        elif isinstance(body, End):
            self.free()
        elif isinstance(body, Truncate) and body.to <= self.cursor.accepted:
            self._cut(body)
        elif isinstance(body, KeepCache):
            self.retained = True
            self._downstream.tell(body)
            if self.host.draining:  # a leaving node keeps no session
                self.free()
        else:
            self._refuse(ErrorCode.MALFORMED)

    def _refuse(self, code: ErrorCode) -> None:
        """End the session with the error `code`, after an invalid input or message from the hop before, which is named.

        The last hop names it on its outputs, too, since the hop before would have to pass the report on.
        """
        before = self.opened.index - 1  # -1: the client, which hears the code itself
        self._output_stream.close(*([self._send_fault(before, code)] if before >= 0 else []), Error(code))
        if self._upstream is not None:
            self._upstream.close(Error(code))
        self.free()

    def _cut(self, truncate: Truncate, to: int | None = None) -> None:
        """Take back the positions behind a truncation, and here those from `to` on, if that is earlier."""
        to = truncate.to if to is None else to
        if truncate.to <= self.cursor.accepted and self.cursor.truncate(replace(truncate, to=to)):
            self.transcript.end()
            self._codecs.schedule.truncate(truncate.to)
            self.computed = min(self.computed, to)
            self._downstream.cut(truncate)
            if self.opened.drafts:
                self._retractions.record(self.cursor.turn, to)
            if self.lead is not None:
                self.lead.cut(to)

    def _submit(
        self,
        end: int,
        parts: tuple[tuple[TensorInfo, Buffer], ...],
        want: Want,
        reorder: tuple[int, ...],
        skip: int,
        *,
        guessed: int = 0,
    ) -> None:
        start, truncate = self.cursor.advance(end, guessed)
        self.moved_s = asyncio.get_running_loop().time()
        self.transcript.record(start - skip, parts)
        then, now_s = self._then(start, end), self.pipeline.clock()
        after = len(self.opened.route) - 1 - self.opened.index
        guesses = False, guessed, self.cursor.turn, self.cursor.pop_retraction()
        job = Job(
            self.key, start, end - start, parts, then, self._done, now_s, want, reorder, skip, after, truncate, *guesses
        )
        (self._guessed_jobs.put if is_last(self.opened) else self._compute)(job)

    def _compute(self, job: Job) -> None:
        self.pipeline.submit(job)

    def _then(self, start: int, end: int) -> ForwardHidden | Sample | Return:
        if not is_last(self.opened):
            for chosen in self._codecs.choose(start, end, self._downstream.rtt_s or 0.0, self.pipeline.pass_cost):
                self._tell_client(chosen)
            return ForwardHidden(self._codecs.schedule)
        if self._sampler is not None and self.opened.mode == Mode.RING:
            ahead = self.opened.drafts > 0 and self.opened.proposer == ANY_DRAFTS
            return Sample(self._sampler, first=self._sampler.first(self.cursor.received_end), ahead=ahead)
        return Return()

    def _from_ring(self, frame: Frame, body: Body) -> None:
        last = len(self.opened.route) - 1
        if isinstance(body, Output):
            if len(body.ids) == 1 and body.ids[0] < self.pipeline.vocab_size:
                self._feed(frame.seq, body)
            else:
                self._send_fault(last, ErrorCode.MALFORMED)
        elif isinstance(body, Fault) and body.epoch == self.epoch and body.index in (last - 1, last):
            self._tell_client(body)
        elif isinstance(body, Error | End):
            code = ErrorCode(body.code) if isinstance(body, Error) else ErrorCode.PEER_LOST
            self._send_fault(last, code)

    def _feed(self, position: int, output: Output) -> None:
        """Take a token that the last hop drew as the next input, unless the text ends with it."""
        if self.lead is not None:
            # Compare the guess in flight at `position`, if there is one, with the token that was drawn for it.
            self.lead.record_token(position)
            # Larger ids as an input would fail here.
            if max((*output.forced, *output.guesses), default=0) < self.pipeline.vocab_size:
                self.lead.foresee(position + 1, output.forced, output.guesses)
            if output.final:
                self.lead.pause()
            elif position == self.cursor.sure < self.cursor.accepted:
                if self.lead.judge(output.ids[0]):
                    self.cursor.confirm(position + 1)
                else:
                    self._retract(self.cursor.turn + 1, position)
        if position < self.opened.max_length and not output.final:
            self.cursor.hold(position, output.ids[0])
        if self.lead is None:
            self._feed_what_waits()
        else:  # after all tokens that came together
            self._feed_soon()

    def _feed_soon(self) -> None:
        """Take tokens and guesses as inputs in a later turn of the loop."""
        if not self._feeding:
            self._feeding = True
            asyncio.get_running_loop().call_soon(self._feed_what_waits)

    def _feed_what_waits(self) -> None:
        self._feeding = False
        if self._freed:
            return
        if self.lead is not None:
            self._feed_ahead(self.lead)
            return
        while (token := self.cursor.next_token()) is not None:
            self._submit(self.cursor.accepted + 1, (token,), Want.NOTHING, (), 0)

    def _feed_ahead(self, lead: DraftLead) -> None:
        """Submit the tokens that wait, and guesses behind them."""
        next_ids = self.cursor.next_ids()
        lead.know(next_ids)
        guesses = lead.propose(inputs_end(self.opened)) if self._may_guess(len(next_ids)) else []
        ids = [guess.id for guess in guesses]
        start, end = self.cursor.accepted, self.cursor.accepted + len(next_ids) + len(guesses)
        if start == end:
            return
        if guesses:
            proposers = tuple(ProposerKind.named(guess.proposer) for guess in guesses)
            self._send_drafts(end - len(guesses), Drafts(tuple(ids), self.cursor.turn, proposers))
        lead.sent(start, end)
        self._submit(end, (ids_input([*next_ids, *ids]),), Want.NOTHING, (), 0, guessed=lead.in_flight)

    def _may_guess(self, submitted: int) -> bool:
        """Return whether guesses may follow `submitted` tokens that are about to be submitted: no token that the client has is
        still on its way here."""
        return self.cursor.sure + submitted >= self.opened.known and not self.cursor.waits

    def _send_drafts(self, start: int, drafts: Drafts) -> None:
        """Tell the last hop the guesses from position `start` on, straight, so that no other hop sees them."""
        ring = self._ring.channel
        if is_last(self.opened):
            self._guessed_jobs.accept(start, drafts)
        elif ring is not None and ring.open:
            ring.send(drafts, seq=start, at_once=True)

    def _done(self, job: Job, result: JobResult, run: Pass) -> None:
        """Send on the result of a job: a step computed alone at once, other work in a later turn of the loop."""
        if self._freed:
            return
        if job.turn < self.opened.epoch * EPOCH_TURNS:  # what counts of an earlier epoch are no guesses
            job = replace(job, guessed=0)
        limit = self._retractions.limit(job.turn)
        end = job.end if limit is None else min(job.end, limit)  # behind it are guesses that do not count any more
        self.computed, alone = end, run.jobs == 1
        if result.error is not None:
            self._record_computed(job, run)  # while the session still exists
            if result.bad_input:
                self._refuse(result.error)
                return
            self._send_fault(self.opened.index, result.error)
            self._output_stream.close(Error(result.error))
            self.free()
        elif isinstance(job.then, ForwardHidden):
            for entry in until(entries_of(job, result.tensors), end):
                self._downstream.send(entry, at_once=alone)
            if job.count == 1 and not job.guessed:
                self._timing.sent(job.end)
        elif result.tensors:
            ((info, payload),) = result.tensors
            self._output_stream.forget()  # in DRIVEN mode the client has the earlier outputs
            self._publish(job.end, Output(tensor=info), (payload,), at_once=alone)
        for drawn in result.tokens:
            logprobs = (drawn.logprobs,) if drawn.logprobs else ()
            self._publish(drawn.position, output_of(drawn), logprobs, at_once=alone and drawn is result.tokens[-1])
        asyncio.get_running_loop().call_soon(self._left, job, run, self.pipeline.clock())

    def _left(self, job: Job, run: Pass, sent_s: float) -> None:
        """Record in the trace that the result of `job` was sent at `sent_s`, and report the time of a single step."""
        (began_s, ended_s, jobs), came_s = run, job.submitted_s
        times_s = {"came_s": came_s, "began_s": began_s, "ended_s": ended_s, "sent_s": sent_s}
        self.trace.record(job.end, job.count, **times_s, batch=jobs, guessed=job.end - job.first_guessed)
        if not self._freed:
            self._record_computed(job, run)
            if job.count == 1 and not job.guessed:
                # Report to the hops that sent a step how long it took here.
                ran = self._timing.step()
                for channel in (self._upstream, self._ring.channel):
                    if ran is not None and channel is not None and channel.open:
                        channel.send(ran, seq=job.end)

    def _record_computed(self, job: Job, run: Pass) -> None:
        """Count the work done for the client, and tell the pipeline that its devices make progress."""
        start, end = units_of(self.opened)
        if not self._answers:
            self.host.peer.completed.answer(self.id)
        self._answers = True
        positions = self.opened.rows * job.count
        self.host.peer.completed.record(self.id, (end - start) * positions, positions)
        self.pipeline.computed(job, run)

    def _publish(self, position: int, output: Output, payload: tuple[Buffer, ...], *, at_once: bool) -> None:
        self._timing.sent(position + 1)  # in a ring this leads to the first hop's next step
        self._output_stream.publish(position, output, payload, at_once=at_once)
        if is_last(self.opened) and self._feeds_itself:
            self._feed(position, output)

    def attach(self, channel: Channel, start: int) -> None:
        """Send the outputs from position `start` on to a channel, present and future ones."""
        channel.on_frame = partial(self._from_subscriber, channel)
        channel.on_lost = lambda _error: self._output_stream.detach(channel)
        self._output_stream.attach(channel, start)

    def _from_subscriber(self, channel: Channel, frame: Frame, body: Body) -> None:
        if isinstance(body, End):
            self._output_stream.detach(channel)
        elif isinstance(body, Ran) and channel.peer == self.opened.route[0].peer:
            self._timing.record_report(frame.seq, body, channel.rtt_s)
        elif isinstance(body, Drafts):
            if self.opened.drafts and is_last(self.opened) and channel.peer == self.opened.route[0].peer:
                self._guessed_jobs.accept(frame.seq, body)
            else:
                self._output_stream.detach(channel)
                channel.close(Error(ErrorCode.MALFORMED))

    # -- faults and the end

    def _from_downstream(self, frame: Frame, body: Body) -> None:
        if isinstance(body, Ran):
            self._timing.record_report(frame.seq, body, self._downstream.rtt_s)
        elif isinstance(body, Fault) and body.index < self.opened.index:  # of hops that its sender cannot judge
            self._send_fault(self.opened.index + 1, ErrorCode.MALFORMED)
        elif isinstance(body, LinkCodec | TookOver) or (isinstance(body, Fault) and body.epoch == self.epoch):
            self._tell_client(body)

    def _downstream_failed(self, error: PeerError) -> None:
        if self._extended is self.opened:  # else the loss is of an older epoch, and the reason for the present one
            self._fault(self.opened.index + 1, error)

    def _fault(self, index: int, error: PeerError | NetworkDown) -> None:
        code = ErrorCode.PEER_LOST if isinstance(error, NetworkDown) else error.code
        self._send_fault(index, code, getattr(error, "retry_s", None) or 0.0)

    def _send_fault(self, index: int, code: ErrorCode, retry_s: float = 0.0) -> Fault:
        """Report to the client that hop `index` failed, with this hop's signature, and return the report."""
        self._log.info("session %s: hop %d of its route fails: %s", self.trace_id.hex()[:8], index, code.name)
        self.host.meter.faults[code] += 1
        bare = Fault(self.epoch, index, code, retry_s)
        fault = replace(bare, signature=self.host.peer.sign(bare.statement(self.id)))
        self._tell_client(fault)
        return fault

    def _tell_client(self, body: Fault | LinkCodec | TookOver) -> None:
        """Send `body` to the client, along the hops before this one; does nothing while the upstream is closed."""
        if self._upstream is not None and self._upstream.open:
            self._upstream.send(body)

    def _crashed(self, _error: BaseException) -> None:
        """End the session after an unexpected, logged crash of a task, so that the client uses another peer."""
        self.give_up(ErrorCode.INTERNAL)

    def give_up(self, code: ErrorCode, *, retry_s: float = 0.0) -> None:
        """End the session here and report `code` to the client, which uses another peer at once, or tries again."""
        self._send_fault(self.opened.index, code, retry_s)
        self.free()

    def drain(self) -> None:
        """Tell the client that this node leaves. The session goes on here until it has moved; an orphaned one is freed."""
        if self.orphaned:
            self.free()
        else:
            self.pipeline.snapshot(self.key)  # the hop that takes its place computes few positions again
            self._send_fault(self.opened.index, ErrorCode.DRAINING)

    def _upstream_lost(self, error: PeerError) -> None:
        self._log.info("session %s: upstream is gone (%s)", self.trace_id.hex()[:8], error)
        self._orphaned = asyncio.get_running_loop().call_later(self.host.config.orphan_grace_s, self.free)

    @property
    def orphaned(self) -> bool:
        """Whether its upstream is gone, so that it will be freed soon."""
        return self._orphaned is not None

    def free(self) -> None:
        """End the session here: free its memory, close its links to other hops. Calling it again changes nothing."""
        if self._freed:
            return
        self._freed = True
        self._log.info("session %s: over after %d positions", self.trace_id.hex()[:8], self.cursor.accepted)
        if self._orphaned is not None:
            self._orphaned.cancel()
        self._end_lead()
        is_replaced = (
            self.host.draining and not self.retained
        )  # the hop that takes its place may not have got there yet
        self._downstream.unbind(after_s=self.host.config.orphan_grace_s if is_replaced else 0.0)
        self._ring.unbind()
        if self._upstream is not None:
            self._upstream.close()
        self._output_stream.close()
        self.host.freed(self.id)

    async def close(self) -> None:
        """Free the session, and wait for its tasks."""
        self.free()
        await self._tasks.close()
