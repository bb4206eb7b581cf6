"""Training stage: the layers that a node trains. It computes microbatches for other peers, and follows the coordinator.

Shared state changes on the event loop without an await in between; tensors live on the bench's thread. The next FORWARD
must be of `state.step`; a FORWARD of the step after it waits for the COMMIT, which may still be on its way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from swarmnode.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, End, Error, Fault
from swarmnode.codec.training_messages import (
    MAX_RATES,
    Begin,
    Commit,
    Condition,
    Discard,
    Failed,
    Forward,
    Labels,
    Lead,
    PathRate,
    ProgressReport,
    Pull,
    Reduce,
    Reduced,
    Release,
    Restore,
    Status,
    Sync,
    Work,
)
from swarmnode.compute.executor import Urgency
from swarmnode.errors import ErrorCode, NotFinite, ProtocolError, SwarmnodeError
from swarmnode.links.switchboard import Channel
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.questions import LocalPeer, board_of
from swarmnode.plan.findings import Kind
from swarmnode.swarm.records.run import decode_run
from swarmnode.training.averaging.all_reduce import AllReducer
from swarmnode.training.coordinator.link_times import SAVE_S
from swarmnode.training.coordinator.worker_group import Following, LeadClaims, Line
from swarmnode.training.spot_checks.spot_checks import SpotChecks
from swarmnode.training.worker.activation_compressor import ActivationCompressor
from swarmnode.training.worker.admission import refusal_of
from swarmnode.training.worker.microbatch_in_flight import (
    AdmissionQueue,
    Arrival,
    MicrobatchInFlight,
    TrainingMeter,
    place_of,
)
from swarmnode.training.worker.stage_state import StageState
from swarmnode.training.worker.training_parts import TrainingParts

log = logging.getLogger(__name__)

TRAIN_PROTOCOL = "/swarmnode/train/1"
RETRY_S = 0.5
WAITED_FOR_S = 60.0  # longest time that a node which wants to move waits for an averaging


@dataclass(eq=False)
class TrainingStage:
    """The stage of a training node. `may_lead` returns whether the stage follows a peer. `on_work` is called for trainers
    that offer work."""

    peer: LocalPeer
    parts: TrainingParts
    checkpoint_manager: CheckpointManager
    _: KW_ONLY
    compressor: ActivationCompressor
    spot_checks: SpotChecks

    def __post_init__(self) -> None:
        self.segment = self.parts.segment
        self._peer_id = self.peer.network.peer_id
        self.meter = TrainingMeter(self.parts.span)
        self.shared_executor = self.parts.shared_executor
        links = self.peer.link_config
        self.switchboard = board_of(
            self.peer, TRAIN_PROTOCOL, accept=self._accept, on_peer_lost=self.peer.lost_neighbour
        )
        self.gate = links.gate
        self.following = Following(on_crash=links.supervisor.ends_peer)
        self._claims = LeadClaims(self.following)
        self.state = StageState(self.parts, self.checkpoint_manager)
        self.may_lead: Callable[[PeerId], bool] = lambda _peer: True
        self.on_work: Callable[[Channel, Work], None] = lambda channel, _body: channel.close(Error(ErrorCode.ELSEWHERE))
        self._all_reducer = AllReducer(self._peer_id, self.switchboard, self.shared_executor, self.compressor.allowed)
        self._admission_queue = AdmissionQueue(self.parts)
        self.labels = self._admission_queue.labels
        self.completed = self.peer.completed
        self._settled = asyncio.Event()
        self._settled.set()
        self._move: asyncio.Task[None] | None = None  # to another run or step
        self._all_reduce: asyncio.Task[None] | None = None
        self._tasks = Tasks("training stage", on_crash=links.supervisor.ends_peer)
        self._in_flight = Tasks("microbatches", on_crash=links.supervisor.ends_conversation)

    def __repr__(self) -> str:
        return f"<TrainingStage {self.segment!r} {self.state!r}, {self.following!r}>"

    async def start(self) -> None:
        """Start to answer other peers' messages about this training."""
        await self.switchboard.start()
        await self.spot_checks.start()

    async def close(self) -> None:
        """Save the step that the stage has learnt, if it is ready, and close everything."""
        await self._in_flight.close()
        await self._tasks.close()
        await self.following.close()
        await self.switchboard.close()
        await self.spot_checks.close()
        if self.state.condition == Condition.READY and not self.state.is_as_founded:
            try:
                await asyncio.wait_for(self.state.save(), SAVE_S)
            except asyncio.TimeoutError:
                log.warning("your node could not save step %d within %.0f s", self.state.step, SAVE_S)
        self.parts.close()
        self.compressor.close()

    # -- conversations

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        take = OPENINGS.get(type(body))
        if not self._may_say(channel.peer, body):
            channel.close(Error(ErrorCode.REFUSED))
        elif take is None:
            channel.close(Error(ErrorCode.MALFORMED))
        else:
            take(self, channel, body, frame.payload)

    def _may_say(self, peer: PeerId, body: Body) -> bool:
        if isinstance(body, Work):
            return self.gate.may_feed(peer)
        return not isinstance(body, Lead) or self.may_lead(peer)

    def _forward(self, channel: Channel, body: Forward, payload: bytes | bytearray) -> None:
        arrival, refusal = Arrival(channel, body, payload), self._refusal_of(body, channel.peer)
        if refusal is None and not self._admission_queue.reserve(arrival):
            refusal = ErrorCode.BUSY
        if refusal is not None:
            channel.close(Fault(0, body.hop, refusal))
        elif body.step > self.state.step:
            self._admission_queue.wait(arrival)
        else:
            microbatch = MicrobatchInFlight(self, *arrival)
            self._admission_queue.begin(microbatch)
            self._in_flight.spawn(microbatch.run(), f"lease {body.lease}")

    def _receive_labels(self, channel: Channel, body: Labels, payload: bytes | bytearray) -> None:
        refusal = self._refusal_of(body, channel.peer) or self.labels.put(body, payload)
        if refusal is not None:
            channel.close(Fault(0, body.hop, refusal))
        else:
            channel.on_frame = lambda _frame, _body: self.labels.drop([body.lease])
            channel.on_lost = lambda _error: self.labels.drop([body.lease])

    def _refusal_of(self, body: Forward | Labels, sender: PeerId) -> ErrorCode | None:
        hop, state = body.route[body.hop], self.state
        able = state.condition == Condition.READY and state.step <= body.step <= state.step + 1
        if (
            body.term != self.following.term
            or not able
            or state.run is None
            or self._admission_queue.is_released(body.lease)
        ):
            return ErrorCode.STALE
        refusal = refusal_of(body, sender, self._peer_id, state.run, self.following.key)
        if refusal is not None:
            return refusal
        if not self.segment.start <= hop.start < hop.end <= self.segment.end:
            return ErrorCode.WRONG_SPAN
        return None

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """Free the resources of a microbatch that has ended."""
        self._admission_queue.ended(microbatch)
        if microbatch.stored is not None:
            self.spot_checks.records.close(microbatch.stored)
        for part, _ in microbatch.parts:
            self._tasks.spawn(_settle(part.drop(place_of(microbatch.body))), "drop")
        if self.state.has_new_speed():
            self.tell_status()

    def lost_counts(self) -> None:
        """Discard all counts after a broken backward pass, as after a DISCARD: other devices may hold a part of the microbatch."""
        self._discard()
        if self.following.line is not None:
            self._answer(self.following.line, FrameKind.DISCARD)

    def _discard(self) -> None:
        self._admission_queue.give_up_all()
        self.spot_checks.records.clear()
        discarding = self.shared_executor.call(Urgency.CONTROL, self.state.learner.discard, kind="discard gradients")
        self._tasks.spawn(_settle(discarding), "discard")

    def blame(self, error: NotFinite | ProtocolError, lease: int) -> None:
        """Report the layer that met NaN in a microbatch, or the peer that sent false values, to the coordinator."""
        self.meter.not_finite += 1
        line = self.following.line
        if line is not None and line.open:
            peer, unit = (error.peer or "", -1) if isinstance(error, ProtocolError) else ("", error.unit)
            line.send(Failed(lease, peer, ErrorCode.NOT_FINITE, unit, self.state.run_id))

    # commands of the coordinator

    def follow(self, line: Line, first: Lead | None = None) -> None:
        """Accept commands of a coordinator on `line`; `first` is a LEAD that has already arrived."""
        line.on_frame = lambda _frame, body: self.execute(line, body)
        line.on_lost = lambda error: self.following.lost(line, error)
        if first is not None:
            self.execute(line, first)

    def _receive_lead(self, channel: Channel, body: Lead, _payload: bytes | bytearray) -> None:
        self.follow(channel, body)
        self._claims.add(channel)

    def execute(self, line: Line, body: Body) -> None:
        """Execute a command. The line of a coordinator that is not in force is closed with STALE."""
        if isinstance(body, Lead):
            if self.following.accepts(line, body):
                self._admission_queue.new_term()
            self._answer(line, FrameKind.LEAD)
        elif isinstance(body, End):
            self.following.lost(line, None)
        elif self.following.line is not line:
            line.close(Error(ErrorCode.STALE))
        else:
            self.following.record_message()
            if (do := COMMANDS.get(type(body))) is not None:
                do(self, line, body)

    def _release(self, line: Line, body: Release) -> None:
        if body.run == self.state.run_id:
            self._admission_queue.release(body.leases)
        self._answer(line, FrameKind.RELEASE)

    def _discard_for(self, line: Line, body: Discard) -> None:
        if body.run == self.state.run_id:
            self._discard()
        self._answer(line, FrameKind.DISCARD)

    def _begin_reducing(self, line: Line, body: Reduce) -> None:
        self._all_reduce = self._instead_of(self._all_reduce, self._reduce(line, body))

    def _begin_moving(self, line: Line, body: Begin | Sync | Restore) -> None:
        self._move = self._instead_of(self._move, self._moving(line, body))

    def _instead_of(self, earlier: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start `work` for a command of the coordinator as a task, and cancel the task of the `earlier` command of its kind."""
        if earlier is not None:
            earlier.cancel()
        return self._tasks.spawn(work, "command")

    def _answer(self, line: Line, kind: FrameKind) -> None:
        """Send a STATUS to the coordinator, in answer to a command of this kind, after the work begun before is finished."""
        self._tasks.spawn(self._tell(line, kind), "status")

    async def _tell(self, line: Line, kind: int = 0) -> None:
        def tell() -> Status:
            return self.state.status(self.following.term, kind, self.compressor.slowest_link_s)

        status = await self.shared_executor.call(Urgency.CONTROL, tell, kind="status", owner=line.peer)
        if line.open:
            line.send(status)

    def tell_status(self) -> None:
        """Send the coordinator a STATUS that it did not ask for."""
        if self.following.line is not None:
            self._tasks.spawn(self._tell(self.following.line, 0), "status")

    async def _moving(self, line: Line, body: Begin | Sync | Restore) -> None:
        """Go to another run or step, then send a STATUS. After an error the stage stays where it can be commanded again."""
        try:
            run = decode_run(body.run)
            if isinstance(body, Begin):
                await self.state.begin(run)
            elif isinstance(body, Restore):
                await self.state.restore(run, body.step)
            else:
                self._admission_queue.give_up_all()
                await self.state.sync(run, body.step, body.peers)
        except SwarmnodeError as error:
            log.warning("%s failed: %s", type(body).__name__.upper(), error)
            if isinstance(body, Sync):
                await asyncio.sleep(RETRY_S)
        await self._tell(line, KIND_OF[type(body)])

    async def _reduce(self, line: Line, body: Reduce) -> None:
        state = self.state
        listening = state.condition == Condition.LISTENING
        state.agreed = None
        self._settled.clear()
        if state.run is not None and any(len(group.members) > 1 for group in body.groups):
            self.parts.average(state.run)
        answer: Body
        try:
            if body.run != self.state.run_id:
                raise ProtocolError("the REDUCE is of another run", code=ErrorCode.WRONG_RUN)
            if await state.counts_less(body, self._peer_id):
                await self._tell(line, FrameKind.DISCARD)  # first, or the coordinator would ask for the same again
                raise ProtocolError("the REDUCE expects microbatches that are not counted here", code=ErrorCode.STALE)
            with self.meter.averaging.timing():
                term, learner = self.following.term, state.learner
                watched = None if self._checking is None else self._checking.watch(body, learner)
                reducing = self._all_reducer.reduce(term, body, learner, listening=listening, watched=watched)
                agreed = await asyncio.wait_for(reducing, body.within_s or None)
                state.agree(agreed, body.groups)
            suspect = agreed.suspect
            if self._checking is not None:
                if suspect:
                    unlike = f"what it contributed to step {body.step} is unlike the others' gradients"
                    self._checking.standing.add(suspect, Kind.OUTLYING, unlike)
                suspect = await self._checking.check(body, self.state.learner) or suspect
            rates = [PathRate(peer, bps) for peer, bps in agreed.rates_bps.items()]
            answer = Reduced(
                body.step, body.attempt, tuple(agreed.squares), body.run, suspect, tuple(rates[:MAX_RATES])
            )
        except asyncio.TimeoutError:
            answer = Failed(body.attempt, "", ErrorCode.PEER_LOST, run=body.run)
        except SwarmnodeError as error:
            log.warning("step %d, attempt %d to reduce: %s", body.step, body.attempt, error)
            unit, peer = getattr(error, "unit", None), getattr(error, "peer", None)
            answer = Failed(body.attempt, peer or "", error.code, -1 if unit is None else unit, body.run)
        if isinstance(answer, Failed):
            self._settled.set()
        if line.open:
            line.send(answer)

    async def settled(self) -> None:
        """Wait, at most WAITED_FOR_S seconds, until the update that the replicas have agreed on is committed. If this stage ended
        before, the update might be lost with it, and all would have to repeat the step."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._settled.wait(), WAITED_FOR_S)

    @property
    def _checking(self) -> SpotChecks | None:
        """The spot checks; None while this stage lacks the step's parameters."""
        return self.spot_checks if self.state.condition == Condition.READY else None

    def _commit(self, line: Line, body: Commit) -> None:
        if self.state.misses(body):
            return
        done = self.state.commit(body)
        if done is None:
            self._answer(line, FrameKind.COMMIT)
            return
        self._settled.set()
        self.spot_checks.records.clear()
        self.compressor.begin_step(body.beat_s, body.slowest_link_s)
        self._tasks.spawn(self._after_commit(line, done), "commit")
        for arrival in self._admission_queue.next_step(self.state.step):
            self._forward(*arrival)

    async def _after_commit(self, line: Line, done: asyncio.Future[None]) -> None:
        await asyncio.shield(done)  # the update must not be cancelled with this task
        if self.state.is_due:
            await self.state.save()
        await self._tell(line)


OPENINGS: Mapping[type[Body], Callable[[TrainingStage, Channel, Any, Any], None]] = {
    Forward: TrainingStage._forward,
    Labels: TrainingStage._receive_labels,
    Pull: lambda stage, channel, body, _payload: stage._all_reducer.receive(channel, body),
    Lead: TrainingStage._receive_lead,
    Work: lambda stage, channel, body, _payload: stage.on_work(channel, body),
}
"""Handlers of the messages that may begin a conversation (`docs/training-step.md`)."""

COMMANDS: Mapping[type[Body], Callable[[TrainingStage, Line, Any], None]] = {
    Begin: TrainingStage._begin_moving,
    Restore: TrainingStage._begin_moving,
    Sync: TrainingStage._begin_moving,
    Release: TrainingStage._release,
    Discard: TrainingStage._discard_for,
    Reduce: TrainingStage._begin_reducing,
    Commit: TrainingStage._commit,
    ProgressReport: lambda _stage, _line, _body: None,  # shows that the coordinator lives, which `execute` notes
}
"""Handlers of the coordinator's commands; LEAD, which puts a coordinator in force, is handled before."""


async def _settle(future: asyncio.Future[Any]) -> None:
    await future
