"""TrainingStage: the units that a node trains. It computes microbatches for whoever sends them, and follows the coordinator.

Shared state changes on the loop without an await in between; tensors live on the bench's thread. `step` is what the next
FORWARD must be of; one of the step after it waits for the COMMIT that may still be on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import Body, End, Error, Fault, Hello
from swarmnode.codec.training_messages import (
    Begin,
    Commit,
    Condition,
    Discard,
    Failed,
    Forward,
    Lead,
    Pull,
    Reduce,
    Reduced,
    Release,
    Restore,
    Status,
    Sync,
    Work,
)
from swarmnode.compute.executor import Executor, Urgency
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import ErrorCode, LocalError, NotFinite, PeerError, ProtocolError, SwarmnodeError
from swarmnode.ledger import MemoryLedger
from swarmnode.net.interfaces import Network, PeerId
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Channel, Switchboard
from swarmnode.net.tasks import Tasks
from swarmnode.plan.view import Span
from swarmnode.roles.training.averaging.all_reduce import Agreed, AllReducer
from swarmnode.roles.training.checkpoints.checkpoint_manager import CheckpointManager
from swarmnode.roles.training.coordinator.answer_times import SAVE_S
from swarmnode.roles.training.coordinator.worker_handle import Line
from swarmnode.roles.training.worker.activation_compressor import ActivationCompressor
from swarmnode.roles.training.worker.admission import refusal_of
from swarmnode.roles.training.worker.admission_queue import AdmissionQueue, Arrival
from swarmnode.roles.training.worker.following import Following
from swarmnode.roles.training.worker.memory import TrainingMemory
from swarmnode.roles.training.worker.meter import TrainingMeter
from swarmnode.roles.training.worker.microbatch_in_flight import MicrobatchInFlight, place_of
from swarmnode.roles.training.worker.status import counted_of
from swarmnode.roles.training.worker.unit_time import UnitTime
from swarmnode.swarm.records.run import Run, decode_run, encode_run

log = logging.getLogger(__name__)

TRAIN_PROTOCOL = "/swarmnode/train/1"
RETRY_S = 0.5


class TrainingStage:
    """`may_lead` says whom it follows; `on_work` is called for trainers that offer themselves."""

    def __init__(
        self,
        network: Network,
        hello: Hello,
        link_config: LinkConfig,
        segment: Segment,
        checkpoint_manager: CheckpointManager,
        executor: Executor,
        *,
        compressor: ActivationCompressor | None = None,
        memory: TrainingMemory | None = None,
        unit_time: UnitTime | None = None,
        on_neighbour_lost: Callable[[PeerError], None] = lambda _error: None,
    ) -> None:
        self.segment = segment
        self._peer = network.peer_id
        self.meter = TrainingMeter(Span(segment.start, segment.end))
        self.compressor = compressor or ActivationCompressor("none", ())
        self._memory = memory or TrainingMemory(MemoryLedger(), segment)
        self.bench = executor
        self.switchboard = Switchboard(
            network, TRAIN_PROTOCOL, hello, link_config, accept=self._accept, on_peer_lost=on_neighbour_lost
        )
        self.gate = link_config.gate
        self.following = Following(on_crash=link_config.supervisor.ends_peer)
        self.step = 0
        self.condition = Condition.BLANK
        self.run: Run | None = None
        self.may_lead: Callable[[PeerId], bool] = lambda _peer: True
        self.on_work: Callable[[Channel, Work], None] = lambda channel, _body: channel.close(Error(ErrorCode.ELSEWHERE))
        self._learner: Learner | None = None
        self._checkpoint_manager = checkpoint_manager
        self._all_reducer = AllReducer(network.peer_id, self.switchboard, self.bench)
        self._admission_queue = AdmissionQueue(self._memory)
        self.unit_time = unit_time or UnitTime()
        self._agreed: Agreed | None = None
        self._heard: list[tuple[int, Agreed, float]] = []  # while listening: agreed gradients and norms by step
        self._losses: dict[int, float] = {}
        self.last = (0.0, 0.0)  # norm and loss of the step before
        self._move: asyncio.Task[None] | None = None  # to another run or step
        self._all_reduce: asyncio.Task[None] | None = None
        self._tasks = Tasks("training stage", on_crash=link_config.supervisor.ends_peer)
        self._in_flight = Tasks("microbatches", on_crash=link_config.supervisor.ends_conversation)

    def __repr__(self) -> str:
        return f"<TrainingStage {self.segment!r} {self.condition.name} at step {self.step}, {self.following!r}>"

    @property
    def term(self) -> int:
        """The highest that it has heard."""
        return self.following.term

    @property
    def coordinator(self) -> PeerId | None:
        """Whom it follows."""
        return self.following.coordinator

    @property
    def run_id(self) -> bytes:
        """Empty before a run has begun."""
        return b"" if self.run is None else self.run.id

    @property
    def learner(self) -> Learner:
        """Raises LocalError before a run has begun."""
        if self._learner is None:
            raise LocalError("no training has begun here")
        return self._learner

    async def start(self) -> None:
        """Answer from now on."""
        await self.switchboard.start()

    async def close(self) -> None:
        """Keep the step that is reached, and leave."""
        await self._in_flight.close()
        await self._tasks.close()
        await self.following.close()
        await self.switchboard.close()
        if self._learner is not None and self.condition == Condition.READY:
            try:
                await asyncio.wait_for(self._save(self._learner), SAVE_S)
            except asyncio.TimeoutError:
                log.warning("step %d could not be kept within %.0f s", self.step, SAVE_S)
        self._memory.close()

    # -- conversations

    def _accept(self, channel: Channel, frame: Frame, body: Body) -> None:
        if not self._may_say(channel.peer, body):
            channel.close(Error(ErrorCode.REFUSED))
        elif isinstance(body, Forward):
            self._forward(Arrival(channel, body, frame.payload))
        elif isinstance(body, Pull):
            self._all_reducer.hear(channel, body)
        elif isinstance(body, Lead):
            self.follow(channel)
            self.obey(channel, body)
        elif isinstance(body, Work):
            self.on_work(channel, body)
        else:
            channel.close(Error(ErrorCode.MALFORMED))

    def _may_say(self, peer: PeerId, body: Body) -> bool:
        if isinstance(body, Work):
            return self.gate.may_feed(peer)
        return not isinstance(body, Lead) or self.may_lead(peer)

    def _forward(self, arrival: Arrival) -> None:
        body = arrival.body
        refusal = self._refusal_of(arrival)
        if refusal is not None:
            arrival.channel.close(Fault(0, body.hop, refusal))
        elif body.step > self.step:
            self._admission_queue.wait(arrival)
        else:
            microbatch = MicrobatchInFlight(self, *arrival)
            self._admission_queue.begin(microbatch)
            self._in_flight.spawn(microbatch.run(), f"lease {body.lease}")

    def _refusal_of(self, arrival: Arrival) -> ErrorCode | None:
        body, sender = arrival.body, arrival.channel.peer
        hop = body.route[body.hop]
        able = self.condition == Condition.READY and self.step <= body.step <= self.step + 1
        if body.term != self.term or not able or self.run is None or self._admission_queue.is_released(body.lease):
            return ErrorCode.STALE
        refusal = refusal_of(body, sender, self._peer, self.run, self.following.key)
        if refusal is not None:
            return refusal
        if not self.segment.start <= hop.start < hop.end <= self.segment.end:
            return ErrorCode.WRONG_SPAN
        return None if self._admission_queue.takes(arrival) else ErrorCode.BUSY

    def ended(self, microbatch: MicrobatchInFlight) -> None:
        """A microbatch is over, in whatever way: what it kept goes."""
        self._admission_queue.ended(microbatch)
        learner, place = self._learner, place_of(microbatch.body)
        if learner is not None:
            self._on_bench(lambda: learner.drop(place))

    def note_loss(self, number: int, loss: float) -> None:
        """Of a microbatch that the model's last unit has counted; on the bench."""
        self._losses[number] = loss

    def blame(self, error: NotFinite) -> None:
        """Let the coordinator know which unit met NaN."""
        self.meter.not_finite += 1
        line = self.following.line
        if line is not None and line.open:
            line.send(Failed(0, "", error.code, error.unit, self.run_id))

    # -- the coordinator's word

    def follow(self, line: Line) -> None:
        """Hear a coordinator's commands on this line."""
        line.on_frame = lambda _frame, body: self.obey(line, body)
        line.on_lost = lambda error: self.following.lost(line, error)

    def obey(self, line: Line, body: Body) -> None:
        """Do what a command says; one of a coordinator that is not in force any more is answered STALE."""
        if isinstance(body, Lead):
            self._lead(line, body)
        elif isinstance(body, End):
            self.following.lost(line, None)
        elif self.following.line is not line:
            line.close(Error(ErrorCode.STALE))
        else:
            self.following.heard()
            self._do(line, body)

    def _do(self, line: Line, body: Body) -> None:
        """A command of the coordinator in force; PROGRESS is one to go on waiting."""
        if isinstance(body, Commit):
            self._commit(line, body)
        elif isinstance(body, Release):
            self._admission_queue.release(body.leases)
            self._answer(line, FrameKind.RELEASE)
        elif isinstance(body, Discard):
            self._admission_queue.give_up_all()
            if self._learner is not None and body.run == self.run_id:
                self._on_bench(self._learner.discard)
            self._answer(line, FrameKind.DISCARD)
        elif isinstance(body, Reduce):
            self._all_reduce = self._instead_of(self._all_reduce, self._reduce(line, body))
        elif isinstance(body, Begin):
            self._move = self._instead_of(self._move, self._moving(line, FrameKind.BEGIN, self._begin(body)))
        elif isinstance(body, Sync):
            self._move = self._instead_of(self._move, self._moving(line, FrameKind.SYNC, self._sync(body)))
        elif isinstance(body, Restore):
            self._move = self._instead_of(self._move, self._moving(line, FrameKind.RESTORE, self._restore(body)))

    def _lead(self, line: Line, body: Lead) -> None:
        """Let go of what is in flight and follow the sender, or tell it which term is in force."""
        if self.following.accepts(line, body):
            self._admission_queue.new_term()
        self._answer(line, FrameKind.LEAD)

    def _instead_of(self, earlier: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a command that takes its time; the earlier one of its kind is given up."""
        if earlier is not None:
            earlier.cancel()
        return self._tasks.spawn(work, "command")

    def _answer(self, line: Line, kind: FrameKind) -> None:
        """STATUS as of when everything that came before is done."""
        self._tasks.spawn(self._tell(line, kind), "status")

    async def _tell(self, line: Line, kind: int = 0) -> None:
        status = await self.bench.call(Urgency.CONTROL, lambda: self._status(kind))
        if line.open:
            line.send(status)

    def _status(self, kind: int) -> Status:
        """Made on the bench, where the masks are."""
        masks = {} if self._learner is None else dict(self._learner.counted)
        last = masks.get(self.segment.units - 1, 0)
        losses = tuple(self._losses.get(number, 0.0) for number in range(last.bit_length()) if last >> number & 1)
        run = self.run or self._checkpoint_manager.run
        norm, loss = self.last
        return Status(
            self.term,
            self.condition,
            self.segment.start,
            self.segment.end,
            b"" if run is None else encode_run(run),
            self.step,
            counted_of(masks),
            self._checkpoint_manager.kept(),
            self._agreed is not None,
            losses,
            norm,
            loss,
            kind,
            self.unit_time.unit_s,
        )

    async def _moving(self, line: Line, kind: FrameKind, move: Coroutine[Any, Any, None]) -> None:
        """Go to another run or step, and say where that led; what goes wrong leaves the stage where it can be asked again."""
        try:
            await move
        except SwarmnodeError as error:
            log.warning("%s failed: %s", kind.name, error)
            if kind == FrameKind.SYNC:
                await asyncio.sleep(RETRY_S)
        await self._tell(line, kind)

    async def _begin(self, body: Begin) -> None:
        """Step 0 of a run, with the parameters as they are."""
        again = self.run is not None  # parameters are not the founding ones any more: a joiner must find step 0 here
        learner = await self._take_up(decode_run(body.run), 0)
        if again:
            await self._save(learner)
        self.condition = Condition.READY

    async def _take_up(self, run: Run, step: int) -> Learner:
        """A new learner, which is not ready yet."""
        self.condition = Condition.BLANK
        self._checkpoint_manager.open(run)
        await self._checkpoint_manager.serve(self._fresh)
        self.run, self.step, self._agreed, self._losses = run, step, None, {}
        learner = await self.bench.call(
            Urgency.CONTROL, lambda: Learner(self.segment, run, step=step, recompute=self._memory.begin(run))
        )
        self._memory.hold(learner)
        self._learner = learner
        return learner

    async def _fresh(self) -> int:
        """Write down the step that this stage is at, for a replica that asks."""
        if self.condition != Condition.READY:
            raise LocalError("this stage is behind itself")
        learner = self.learner
        return await self.bench.call(Urgency.CONTROL, lambda: self._checkpoint_manager.save(learner))

    async def _restore(self, body: Restore) -> None:
        """A step on the disk."""
        learner = await self._take_up(decode_run(body.run), body.step)
        await self.bench.call(Urgency.CONTROL, lambda: self._checkpoint_manager.load(learner, body.step))
        self.condition = Condition.READY

    async def _sync(self, body: Sync) -> None:
        """Fetch a state while the all-reduces are heard, then catch up."""
        self._admission_queue.give_up_all()
        self._heard = []
        learner = await self._take_up(decode_run(body.run), body.step)
        self.condition = Condition.LISTENING
        step = await self._checkpoint_manager.fetch(lambda: body.peers, learner.blocks, at_least=body.step)
        await self.bench.call(Urgency.CONTROL, lambda: self._checkpoint_manager.load(learner, step))
        self.step = step
        while self._heard:
            missed, agreed, norm = self._heard.pop(0)
            if missed == self.step:
                await self.bench.call(Urgency.CONTROL, partial(agreed.commit, learner, norm))
                self.step += 1
        self.condition = Condition.READY

    async def _reduce(self, line: Line, body: Reduce) -> None:
        listening = self.condition == Condition.LISTENING
        self._agreed = None
        if any(len(group.members) > 1 for group in body.groups):
            self._memory.average()
        answer: Body
        try:
            if body.run != self.run_id:
                raise ProtocolError("a REDUCE of another run", code=ErrorCode.WRONG_RUN)
            with self.meter.averaging.timing():
                reducing = self._all_reducer.reduce(self.term, body, self.learner, listening=listening)
                self._agreed = await asyncio.wait_for(reducing, body.within_s or None)
            answer = Reduced(body.step, body.attempt, tuple(self._agreed.squares), self.run_id)
        except asyncio.TimeoutError:
            answer = Failed(body.attempt, "", ErrorCode.PEER_LOST, run=self.run_id)
        except SwarmnodeError as error:
            log.warning("step %d, attempt %d to reduce: %s", body.step, body.attempt, error)
            unit, peer = getattr(error, "unit", None), getattr(error, "peer", None)
            answer = Failed(body.attempt, peer or "", error.code, -1 if unit is None else unit, self.run_id)
        if line.open:
            line.send(answer)

    def _commit(self, line: Line, body: Commit) -> None:
        agreed, self._agreed = self._agreed, None
        if self.condition == Condition.LISTENING and agreed is not None:
            self._heard.append((body.step, agreed, body.norm))
        elif agreed is None or body.step != self.step or body.run != self.run_id:
            self._answer(line, FrameKind.COMMIT)
        else:
            learner = self.learner
            self.step, self.last, self._losses = body.step + 1, (body.norm, body.loss), {}
            self.compressor.beat_s = body.beat_s
            done = self.bench.call(Urgency.CONTROL, lambda: agreed.commit(learner, body.norm))
            self._tasks.spawn(self._after_commit(line, done), "commit")
            for arrival in self._admission_queue.next_step():
                self._forward(arrival)

    async def _after_commit(self, line: Line, done: asyncio.Future[None]) -> None:
        await asyncio.shield(done)  # the update is made, whatever becomes of us
        assert self.run is not None
        if self.step % self.run.checkpoint_steps == 0 or self.step == self.run.steps:
            await self._save(self.learner)
        await self._tell(line)

    async def _save(self, learner: Learner) -> None:
        """Write the step down. A full disk costs the step, not the training: earlier ones stay."""
        try:
            await self.bench.call(Urgency.CONTROL, lambda: self._checkpoint_manager.save(learner))
        except LocalError as error:
            log.warning("%s", error)

    def _on_bench(self, function: Callable[[], object]) -> None:
        self._tasks.spawn(_settle(self.bench.call(Urgency.CONTROL, function)), "bench")


async def _settle(future: asyncio.Future[Any]) -> None:
    await future
