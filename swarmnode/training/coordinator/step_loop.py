"""Step loop: the steps of one run, from one rendezvous to the next.

A step loop knows only the messages of stages and trainers. Nothing here waits: each message changes the state, `CONDITIONS` tell
which event of `plan/training/coordination.py` has come about, and the coordinator calls the step loop for the actions that follow.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec

from swarmnode import tolerances
from swarmnode.codec.body import Body
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_messages import (
    NOT_EVALUATED,
    Begin,
    Commit,
    Condition,
    Discard,
    Failed,
    ProgressReport,
    Reduced,
    Restore,
    Status,
    StepReport,
    Stopped,
    Sync,
)
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.findings_record import Findings
from swarmnode.plan.compression import slowest_link_s
from swarmnode.plan.training.coordination import Event, RecoveryPlan
from swarmnode.plan.training.step_forecast import ExpectedStep
from swarmnode.plan.training.step_ledger import OutstandingLease, StepLedger
from swarmnode.swarm.records.run import Run, encode_run
from swarmnode.training.coordinator.averaging_groups import AllReduceAttempt, AveragingGroups
from swarmnode.training.coordinator.dispatcher import Dispatcher, TrainerConnections
from swarmnode.training.coordinator.link_times import (
    ALL_REDUCE,
    SAVE_S,
    AnswerTimes,
    FailedAttempts,
    Failures,
    LinkTimes,
)
from swarmnode.training.coordinator.worker_group import Dial, WorkerGroup, WorkerHandle, WorkerState
from swarmnode.training.worker.stage_state import masks_of

log = logging.getLogger(__name__)

SOON = 8  # an eighth of a step is counted: later arrivals do not change its forecast


@dataclass(frozen=True)
class CoordinatorResources:
    """The node's resources for its coordinator in every term.

    `dial` opens a conversation with a stage. `check_run` raises ProtocolError if the model cannot do the run.
    `standing`: this node's findings about peers. `awaits_others` returns whether peers are on their
    way to their spans. `clock` returns seconds.
    """

    units: int
    dial: Dial
    failures: Failures
    link_times: LinkTimes
    check_run: Callable[[Run], None]
    standing: Findings
    codecs: Collection[int]
    clock: Callable[[], float]
    decisions: DecisionLog
    awaits_others: Callable[[], bool]


@dataclass(eq=False)
class StepLoop:
    """The steps of `run`, from `step` on. `puts_off` returns whether a first step waits for other peers."""

    run: Run
    step: int
    resources: CoordinatorResources
    worker_group: WorkerGroup
    dispatcher: Dispatcher
    trainer_connections: TrainerConnections
    averaging_groups: AveragingGroups
    puts_off: Callable[[], bool]

    def __post_init__(self) -> None:
        self._raw_run = encode_run(self.run)
        self.averaging_groups.warm_starts.clear()
        self._all_reduce: AllReduceAttempt | None = None
        self._times = AnswerTimes()  # of all-reduces
        self._astray = False  # a stage did not reach the step
        self._as_founded = False  # the parameters at step 0 are the founder's, which newcomers have, too
        # of NaN in this step: suspects, and perhaps the trainer
        self._claims: list[tuple[frozenset[PeerId], PeerId]] = []
        self._expected = ExpectedStep()
        self._expects_of: tuple[int, tuple[PeerId, ...]] | None = None  # step and stages of the last forecast
        self._begins = True  # nothing is leased yet
        self._stopped: Stopped | None = None
        self._last: StepReport | None = None  # of the last step, until the final weights are evaluated
        self._begin_step()

    def __repr__(self) -> str:
        return f"<StepLoop at step {self.step} of {self.run.steps}, {self._ledger!r}>"

    def _begin_step(self) -> None:
        self._ledger = StepLedger(self.step, self.resources.units, self.run.passes(self.step), self.run.microbatches)
        self.dispatcher.begin(self.run, self._ledger)
        self._began_at_s = self.resources.clock()

    @property
    def counted(self) -> int:
        """Number of microbatches that all layers have counted in this step."""
        return self._ledger.microbatches - len(self._ledger.missing())

    @property
    def expected_s(self) -> float:
        """Expected seconds of the current step; 0 if unknown."""
        return self._expected.expected_s

    @property
    def awaits_others(self) -> bool:
        """Whether the first step is put off for peers on their way to their spans, who would otherwise have to fetch the
        learnt state afterwards."""
        return self.step == 0 and self._as_founded and self.puts_off()

    # -- to the first step

    def begin(self) -> None:
        """Send every stage to step 0, with the parameters of the last run."""
        behind = [member for member in self.worker_group if member.state not in (WorkerState.USABLE, WorkerState.ASKED)]
        for member in self.worker_group.usable():
            member.command(Begin(self._raw_run))
        for member in behind:
            self._sync(member)

    def gather(self, plan: RecoveryPlan) -> None:
        """Send every stage to the step of the recovery plan."""
        self._as_founded = plan.anew or all(member.is_as_founded for member in self.worker_group.answered())
        members = self.worker_group.members
        status = next((members[peer].status for peer in plan.stay if peer in members), None)
        for peer in plan.stay | plan.commit | plan.restore:
            member = members[peer]
            if peer in plan.commit:
                assert status is not None  # a stage commits only if another one has committed
                member.state = WorkerState.COMING
                member.command(Commit(plan.step - 1, status.norm, self.run.id, status.loss))
            elif peer in plan.restore:
                member.command(Restore(self._raw_run, plan.step))
            elif member.status is not None and self._is_here(member.status):
                member.state = WorkerState.USABLE
                self._record_counts(member, member.status)
            else:
                member.command(Begin(self._raw_run))
        for peer in plan.sync:
            self._sync(members[peer])
        # the previous coordinator may have died before it could report the step
        if status is not None and self.step > 0 and not self.trainer_connections.history:
            self._tell_step(status.loss, 0.0, status.norm, len(plan.stay))

    def _is_here(self, status: Status) -> bool:
        """Return whether a stage is ready for the current step."""
        return status.condition == Condition.READY and status.step == self.step and status.run == self._raw_run

    def _sync(self, member: WorkerHandle) -> None:
        """Send SYNC to a stage that is behind: it joins the coming all-reduces as a listener and fetches the state from its
        replicas."""
        holders = tuple(other.peer for other in self.worker_group.usable() if other.span.overlaps(member.span))
        member.command(Sync(self._raw_run, self.step + (self._all_reduce is not None), holders))

    # -- messages from stages

    def receive(self, member: WorkerHandle, body: Body) -> None:
        """Handle a message of a stage. The member has already taken in its status, except for answers to RELEASE."""
        if (hear := FROM_WORKERS.get(type(body))) is not None:
            hear(self, member, body)

    def _receive_status(self, member: WorkerHandle, status: Status) -> None:
        if status.answers == FrameKind.RELEASE:
            if member.state is WorkerState.USABLE and self._is_here(status):
                member.receive(status)
                self._record_counts(member, status, adds=True)
        elif member.state is WorkerState.ASKED:
            # Put a stage that arrived during the run to use, or send it its first command, depending on its report.
            if self._is_here(status):
                member.state = WorkerState.USABLE
                self._record_counts(member, status)
            elif status.condition == Condition.BLANK and self.step == 0 and self._as_founded:
                member.command(Begin(self._raw_run))
            else:
                self._sync(member)
        elif member.state is WorkerState.DISCARDING and status.answers != FrameKind.DISCARD:
            return  # sent before it got the DISCARD
        elif self._is_here(status):
            if member.state is not WorkerState.USABLE:
                member.state = WorkerState.USABLE
                self._ledger.report(member.peer, member.span, {})
            if status.answers == FrameKind.DISCARD:
                self._record_counts(member, status)
        elif status.answers in (FrameKind.BEGIN, FrameKind.RESTORE):
            log.warning("stage %s could not reach step %d", member.peer, self.step)
            self.resources.failures.record(member.peer)
            self._astray = True
        elif status.answers == FrameKind.COMMIT or (
            status.answers == FrameKind.SYNC and status.condition != Condition.READY
        ):
            self._sync(member)  # it came too late for an all-reduce, or did not get a state

    def _record_counts(self, member: WorkerHandle, status: Status, *, adds: bool = False) -> None:
        """Enter a stage's counts in the ledger (`StepLedger.report`). Raises ProtocolError if the step does not have such
        microbatches."""
        masks = masks_of(status.counted, self._ledger.everything)
        self._ledger.report(member.peer, member.span, masks, status.losses, adds=adds)

    def released(self, record: OutstandingLease) -> None:
        """Blame the peers that may have made a released lease fail, and dismiss those that failed FAILURES times if others can
        take their place."""
        for peer in self.dispatcher.blame(record):
            if self.resources.failures.in_a_row(peer) >= tolerances.FAILURES and self.worker_group.can_spare(peer):
                self.worker_group.dismiss(peer, f"it failed {tolerances.FAILURES} times in a row")
        self._stop_if_hopeless()

    def _stop_if_hopeless(self) -> None:
        """Stop the run if all holders of a layer have failed ATTEMPTS times (`hopeless_unit`): another attempt would not help."""
        unit = self.dispatcher.hopeless_unit()
        if unit is not None and self._stopped is None:
            code = self.dispatcher.failed_attempts.code
            facts = (
                f"every machine with layer {unit} has failed {tolerances.ATTEMPTS} times, at last by error {code}",
            )
            self.resources.decisions.record(Topic.TRAINING, f"stops the run at step {self.step}", facts)
            self._stopped = Stopped(self.step, self.run.id, code, unit)

    def _receive_reduced(self, member: WorkerHandle, body: Reduced) -> None:
        if self._all_reduce is not None and (body.run, body.attempt) == (self.run.id, self._all_reduce.attempt):
            member.answered(FrameKind.REDUCE)
            if self._all_reduce.accept(member.peer, body):
                self.resources.failures.forgive(member.peer)
                self.averaging_groups.record_rates(member.peer, body.rates)
                self.dispatcher.separate(member.peer, body.suspect)

    def _receive_failed(self, member: WorkerHandle, body: Failed) -> None:
        """Handle a FAILED message of a stage: its all-reduce failed, or a microbatch gave NaN. Messages of other runs are
        ignored."""
        if body.run != self.run.id:
            return
        all_reduce = self._all_reduce
        if all_reduce is not None and body.lease == all_reduce.attempt and member.answered(FrameKind.REDUCE):
            if body.code == ErrorCode.PEER_LOST and not body.peer:
                all_reduce.expire(member.peer)
            else:
                all_reduce.fail(member.peer, body.peer or None)
            if not body.peer:
                self.dispatcher.failed_attempts.record(ALL_REDUCE, member.peer, body.code)
                self._stop_if_hopeless()
        if body.code == ErrorCode.NOT_FINITE:
            self._receive_claim(member, body)

    def _receive_claim(self, member: WorkerHandle, claim: Failed) -> None:
        """Handle a stage's claim of NaN in a microbatch, made by one of its layers or sent by a neighbour.

        Peers that are suspects in all claims of the step are struck, and a claimant is kept apart from the neighbour that it
        accuses, or from both: together they would rest and come back as the same route, so that no later claim told which of them
        lies. The only suspect is dismissed after FAILURES claims and banned after twice as many; several take turns to be
        dismissed.

        The run stops if no peer is a suspect in all claims; from the second claim on, if none of those peers can be spared; and
        after NAN_CLAIMS.
        """
        if claim.unit >= 0 and not member.span.start <= claim.unit < member.span.end:
            return  # it knows nothing about units that it does not hold
        record = self._ledger.lease(claim.lease)
        suspects = self._suspects(member.peer, claim, record)
        if suspects is None or (record is not None and record.claimed):
            return
        if record is not None:
            record.claimed = True
        # Values of no neighbour may follow from the trainer's, unless it is alone: then it would stay a suspect of all claims.
        feeder = record.trainer if record is not None and not claim.peer else ""
        self._claims.append((suspects, feeder))
        common = frozenset.intersection(
            *(peers if not peer or self._can_do_without(peer) else peers - {peer} for peers, peer in self._claims)
        )
        count, is_spared = len(self._claims), any(map(self._can_do_without, common))
        if not common or (count > 1 and not is_spared) or count >= tolerances.NAN_CLAIMS:
            unit = claim.unit if claim.unit >= 0 or not claim.peer else member.span.start
            self._stopped = Stopped(self.step, self.run.id, ErrorCode.NOT_FINITE, unit)
            return
        beside = () if record is None else [pair for pair in pairwise(record.stages) if member.peer in pair]
        for one, other in [(member.peer, claim.peer)] if claim.peer else beside:
            if self.worker_group.can_spare(one) or self.worker_group.can_spare(other):
                self.dispatcher.separate(one, other)
        for peer in sorted(common):
            self.dispatcher.record_failure(peer, is_trainer=record is not None and peer == record.trainer)
        spared = sorted(peer for peer in common if self.worker_group.can_spare(peer))
        if spared and (count >= 2 * tolerances.FAILURES or (count >= tolerances.FAILURES and len(spared) == 1)):
            suspect = spared[count % len(spared)]
            if count >= 2 * tolerances.FAILURES and common == {suspect}:
                self.resources.failures.ban(suspect)
            self.worker_group.dismiss(suspect, "values that pass through it become NaN or infinite")

    def _suspects(self, claimant: PeerId, claim: Failed, record: OutstandingLease | None) -> frozenset[PeerId] | None:
        """Return the suspects of a claim of NaN; None if the claim is invalid.

        If a neighbour sent it, these are the claimant and the neighbour. If the claimant made it of finite values, they are
        all hops that may have made those values large. A claim is invalid if the claimant is not on the microbatch's route
        or the accused peer is not its neighbour.
        """
        if record is None:
            return frozenset({claimant}) if not claim.lease and not claim.peer else None
        hops = [record.trainer, *record.stages]
        if claimant not in hops[1:]:
            return None
        if not claim.peer:
            return frozenset(hops)
        place = hops.index(claimant, 1)
        feeds = claim.peer == record.trainer and place in (1, len(hops) - 1)  # inputs, and labels
        near = claim.peer in hops[place - 1 : place + 2] and claim.peer != claimant
        return frozenset({claimant, claim.peer}) if near or feeds else None

    def _can_do_without(self, peer: PeerId) -> bool:
        """Return whether a peer can be spared: other stages hold all its layers, or, if it is a trainer, there is another
        trainer."""
        trainers = {line.peer for line in self.trainer_connections}
        return len(trainers) > 1 if peer in trainers else self.worker_group.can_spare(peer)

    def lose(self, peer: PeerId) -> None:
        """Let the all-reduce in progress go on without the stage of `peer`, which is lost."""
        if self._all_reduce is not None:
            self._all_reduce.lose(peer)

    # -- actions

    def has_come(self, event: Event) -> bool:
        """Return whether an event of the current step has come about."""
        return event in CONDITIONS and CONDITIONS[event](self)

    def _is_uncovered(self) -> bool:
        return self._astray or bool(self.worker_group.uncovered(self.resources.units))

    def _is_counted(self) -> bool:
        """Return whether all microbatches are counted once and none is leased.

        Before that, members that count a microbatch that another one counts, too, leave the step, the time of the step is forecast
        anew if stages have changed, and missing microbatches are leased. Returns False, without any of this, while `awaits_others`.
        """
        if self.awaits_others:
            return False
        ledger = self._ledger
        for peer in ledger.conflicts():
            ledger.lose(peer)
            self.worker_group.members[peer].command(Discard(self.run.id))
        if self._begins:
            self._began_at_s = self.resources.clock()
        # Forecast the current step, again if the stages have changed, unless an eighth of its microbatches is already
        # counted.
        is_known = self._stages_here() == self._expects_of and (self.expected_s > 0 or not self._begins)
        if not is_known and self.counted * SOON < self.run.microbatches:
            self._expect(self._forecast_s())
        self.dispatcher.dispatch()
        self._begins = self._begins and not ledger.leases
        hearing = self.worker_group.hearing(self.step)
        resting = any(self.resources.failures.rests(member.peer) for member in hearing)
        return ledger.complete() and not ledger.leases and not resting

    def _is_evaluated(self) -> bool:
        """Return whether the final weights are evaluated, or need not be, or have no trainer that feeds held-out data."""
        feeds = any(line.run == self.run for line in self.trainer_connections)
        return not feeds or self._is_counted()

    def _outcome(self) -> Event | None:
        """Return the all-reduce's end, AGREED or DISAGREED, or None while answers are missing. If a contributor is
        convicted it has failed."""
        all_reduce = self._all_reduce
        if all_reduce is None or not all_reduce.is_decided():
            return None
        failed = all_reduce.failed or self._convicted(all_reduce) is not None
        return Event.DISAGREED if failed else Event.AGREED

    def lease(self) -> None:
        """Prepare another attempt at the step: end a failed all-reduce, and leave out a peer that is convicted of false values.

        Another peer at fault is left out from its second failure in a row on, if others hold its layers. The missing
        microbatches are leased later, in `_is_counted`.
        """
        all_reduce, self._all_reduce = self._all_reduce, None
        if all_reduce is None:
            return
        convicted = self._convicted(all_reduce)
        if convicted is not None:
            # Ban a peer and dismiss it: others compute its microbatches again, and its contribution is not committed.
            reason = "other stages find that what it sends or contributes is not what it computes"
            log.warning("stage %s is left out: %s", convicted, reason)
            self.resources.failures.ban(convicted)
            self.worker_group.dismiss(convicted, reason)
            self.trainer_connections.tell(ProgressReport(self.step, run=self.run.id, left_out=(convicted,)))
        if not all_reduce.failed:
            return
        self.averaging_groups.clusters.give_up()
        culprit = all_reduce.culprit
        if culprit is None:
            self._times.stretch(FrameKind.REDUCE)
        elif self.resources.failures.record(culprit) > 1 and self.worker_group.can_spare(culprit):
            self.worker_group.dismiss(culprit, "the replicas cannot agree with it")

    def _convicted(self, all_reduce: AllReduceAttempt) -> PeerId | None:
        """Return a contributor that sends or contributes false values, by its replicas' majority or by this node's own
        observation; None if there is none."""
        return all_reduce.convicted or min(self.resources.standing.proved & all_reduce.contributors, default=None)

    def reduce(self) -> None:
        """Start the all-reduce of the replicas of each layer; listeners take part without a contribution."""
        hearing = self.worker_group.hearing(self.step)
        groups = self.averaging_groups.make(self.run, self.step, hearing, self._ledger.counts)
        within_s = self._times.wait_s(FrameKind.REDUCE)
        self._all_reduce = AllReduceAttempt(
            self.step,
            next(self.averaging_groups.attempts),
            groups,
            [member.peer for member in hearing],
            run=self.run.id,
            within_s=within_s,
            clock=self.resources.clock,
        )
        for member in hearing:
            answer_s = member.times.wait_s(FrameKind.RELEASE, rtt_s=member.line.rtt_s or 0.0)
            member.command(self._all_reduce.request(member.peer), wait_s=within_s + answer_s)

    def commit(self) -> None:
        """End the step: tell all stages to commit it, report it to the trainers, and begin the next one. To be called only when the
        gradients of the step have been summed."""
        assert self._all_reduce is not None
        usable, loss, norm = self.worker_group.usable(), self._ledger.loss, self._all_reduce.norm()
        measures = (self._ledger.held_out_loss, self._ledger.expert_load)
        self._times.record(FrameKind.REDUCE, self.resources.clock() - self._all_reduce.began_s)
        self.averaging_groups.warm_starts.committed(self._all_reduce.groups, usable)
        self._all_reduce = None
        beat_s = max((member.span.units * member.worker.unit_s for member in usable), default=0.0)
        saves = self.run.is_checkpoint(self.step + 1)
        link_s = slowest_link_s(0.0 if member.status is None else member.status.slowest_link_s for member in usable)
        word = Commit(self.step, norm, self.run.id, loss, beat_s, link_s)
        for member in self.worker_group.hearing(self.step):
            if member.state is WorkerState.LISTENING:
                member.send(word)  # it answers only if it came too late
            else:
                member.command(word, wait_s=SAVE_S if saves else None)
        step_s = self.resources.clock() - self._began_at_s
        self._tell_step(loss, step_s, norm, len(usable), self.step, *measures)
        self.step += 1
        self._claims.clear()
        self._begin_step()
        for member in usable:
            self._ledger.report(member.peer, member.span, {})
        forecast_s = self._forecast_s()
        # Correct the forecasts by the duration of the last step; `forecast_s` is that step's duration by today's
        # measurements.
        expected_s = self.expected_s
        self._expected.end(step_s, forecast_s)
        if expected_s:
            off = abs(step_s / expected_s - 1)
            facts = (
                f"the last one took {step_s:.3g} s, {off:.0%} off the {expected_s:.3g} s expected",
                f"forecasts are multiplied by {self._expected.correction:.2f}, as the last steps have shown",
            )
            self.resources.decisions.record(
                Topic.TRAINING, "forecasts steps from measurements of stages and links", facts
            )
        self._expect(forecast_s)

    def _expect(self, forecast_s: float) -> None:
        self._expects_of = self._stages_here()
        self._expected.begin(forecast_s)

    def _stages_here(self) -> tuple[int, tuple[PeerId, ...]]:
        """Return the number of the present step, and the ids of the peers that can be given work in it."""
        return self.step, tuple(member.peer for member in self.worker_group.usable())

    def _forecast_s(self) -> float:
        """Forecast the seconds of the current step, its microbatches and then the averaging; 0 if a stage's speed is unknown."""
        passing_s = self.dispatcher.passing_s(self.step, self.run.microbatches)
        averaging_s = self.averaging_groups.expected_s(self.run, self.step, self.worker_group.usable())
        return passing_s + averaging_s if passing_s else 0.0

    def _tell_step(
        self,
        loss: float,
        step_s: float,
        norm: float,
        peers: int,
        step: int | None = None,
        held_out: float | None = None,
        expert_load: float = 0.0,
    ) -> None:
        done, expected_s = self.step - 1 if step is None else step, self.expected_s if step_s else 0.0
        held_out_loss = NOT_EVALUATED if held_out is None else held_out
        report = StepReport(done, self.run.id, loss, step_s, norm, peers, expected_s, held_out_loss, expert_load)
        if done == self.run.steps - 1 and self.run.evaluations_at(self.run.steps):
            self._last = report
        else:
            self.trainer_connections.tell(report)

    def stop(self) -> None:
        """End the run, finished or stopped; the last good step stays."""
        stopped, self._stopped = self._stopped or Stopped(self.step, self.run.id), None
        self._all_reduce = None
        if self._last is not None:
            held_out_loss = self._ledger.held_out_loss
            told = NOT_EVALUATED if held_out_loss is None else held_out_loss
            self.trainer_connections.tell(msgspec.structs.replace(self._last, held_out_loss=told))
        self.dispatcher.clear()
        for peer in self.dispatcher.failed_attempts.peers:  # a trainer may try it again
            self.resources.failures.forgive(peer)
        self.dispatcher.failed_attempts = FailedAttempts()
        self.dispatcher.forget_separations()
        if stopped.code:
            for member in self.worker_group.usable():
                member.command(Discard(self.run.id))
        self.trainer_connections.tell(stopped)


FROM_WORKERS: Mapping[type[Body], Callable[[StepLoop, WorkerHandle, Any], None]] = {
    Status: StepLoop._receive_status,
    Reduced: StepLoop._receive_reduced,
    Failed: StepLoop._receive_failed,
}
"""Handlers of the messages of stages (`docs/training-step.md`)."""

CONDITIONS: Mapping[Event, Callable[[StepLoop], bool]] = {
    Event.FAILED: lambda loop: loop._stopped is not None,
    Event.FINISHED: lambda loop: loop.step >= loop.run.steps and loop._is_evaluated(),
    Event.UNCOVERED: StepLoop._is_uncovered,
    Event.COUNTED: lambda loop: loop.step < loop.run.steps and loop._is_counted(),
    Event.DISAGREED: lambda loop: loop._outcome() is Event.DISAGREED,
    Event.AGREED: lambda loop: loop._outcome() is Event.AGREED,
}
"""Conditions of the machine's events (`plan/training/coordination.py`)."""
