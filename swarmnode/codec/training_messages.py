"""Bodies of the training conversations (`protocol/training.md`). The table of `docs/training-step.md` says which peer sends them to
which, and when.

One conversation carries one microbatch: FORWARD opens it with the whole route, BACKWARD ends it. Each body names its run, except
LEAD, which asks for it. All-reduces have bodies of their own (`averaging_messages.py`).
"""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.averaging_messages import AVERAGING_BODIES
from swarmnode.codec.body import (
    MAX_PEER_CHARS,
    MAX_UNITS,
    Block,
    Body,
    Code,
    HopIndex,
    RunBytes,
    Step,
    Unit,
)
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.training_fields import (
    MAX_FED,
    MAX_KEPT_STEPS,
    MAX_LEASES,
    MAX_LEFT_OUT,
    MAX_MASK_BYTES,
    MAX_MEMBERS,
    MAX_RANGES,
    MAX_VALUES,
    MAX_WAITS,
    AnyRunId,
    Duration,
    EncodedRun,
    Index,
    Key,
    LeaseNumber,
    Load,
    Norm,
    Number,
    Peer,
    Route,
    RunId,
    Seal,
    Term,
    Values,
    are_different,
    check_route,
    check_rules,
    check_values,
)

NOT_EVALUATED = -1.0  # no loss of held-out data


class Forward(Body, frozen=True):
    """Microbatch at the boundary before the receiver's layers. The payload is the values' payloads, one after another."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index  # of the microbatch in its step
    route: Route
    hop: HopIndex  # the receiver's place in the route
    values: Values
    run: RunId
    feeder: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""  # the trainer that holds the lease
    within_s: Duration = 0.0  # seconds after which the microbatch is not waited for any more
    seal: Seal = b""  # the lease's seal

    @property
    def sender(self) -> str:
        """Peer that must be the sender of this frame: the hop before the receiver, or the trainer."""
        return self.route[self.hop - 1].peer if self.hop else self.feeder

    def check(self) -> None:
        check_route("FORWARD", self.route, self.hop)
        check_values(self.values)


class Labels(Body, frozen=True):
    """Further inputs of a microbatch's loss, for the last hop of its route only. The payload is the values' payloads, one after
    another.

    The trainer ends the conversation when the microbatch is over.
    """

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index
    route: Route
    values: Values
    run: RunId
    feeder: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""
    within_s: Duration = 0.0
    seal: Seal = b""

    @property
    def hop(self) -> int:
        """Index of the receiver in the route: the last hop."""
        return len(self.route) - 1

    @property
    def sender(self) -> str:
        """Peer that must be the sender of this frame: the trainer."""
        return self.feeder

    def check(self) -> None:
        check_route("LABELS", self.route)
        check_values(self.values)


class Backward(Body, frozen=True):
    """Gradients of a FORWARD's values, in order; `present` says which values have one. Ends the conversation. `expert_load` is of
    the microbatch, if the run has losses of routers."""

    loss: Number
    present: Annotated[tuple[bool, ...], Meta(max_length=MAX_VALUES)]
    values: Values
    run: RunId
    expert_load: Load = 0.0

    def check(self) -> None:
        check_rules("BACKWARD", {"a gradient for each value that it names": sum(self.present) == len(self.values)})
        check_values(self.values)


class Lead(Body, frozen=True):
    """Message that the sender coordinates the training from now on. A stage follows the highest term that it knows, and answers
    STATUS."""

    term: Term
    key: Key = b""  # key of the seals of this term's leases


class Condition(IntEnum):
    """Readiness of a stage, a peer that trains some layers, as it reports to the coordinator."""

    BLANK = 0  # as the swarm was created: no run has begun
    READY = 1  # at `step`, able to work
    LISTENING = 2  # behind the others, catching up


class Counted(Body, frozen=True):
    """Microbatches that layers [start, end) have counted: the bits set in `mask` (little-endian)."""

    start: Unit
    end: Unit
    mask: Annotated[bytes, Meta(max_length=MAX_MASK_BYTES)]


class Status(Body, frozen=True):
    """State of a stage. `reduced` says that the gradients of `step` are agreed, so that only COMMIT is missing."""

    term: Term
    condition: Code
    start: Unit
    end: Unit
    run: RunBytes = b""
    step: Step = 0
    counted: Annotated[tuple[Counted, ...], Meta(max_length=MAX_RANGES)] = ()
    kept: Annotated[tuple[Step, ...], Meta(max_length=MAX_KEPT_STEPS)] = ()  # steps on its disk
    reduced: bool = False
    losses: Annotated[tuple[Number, ...], Meta(max_length=8 * MAX_MASK_BYTES)] = ()  # of the last unit's microbatches
    norm: Norm = 0.0  # of the gradient that led to `step`
    loss: Number = 0.0  # of the step before `step`
    answers: Code = 0  # kind of the command that this answers; 0: no command
    unit_s: Duration = 0.0  # one microbatch through one unit, forward and back: estimated until it is measured
    window: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # microbatches that fit at once; 0: unknown
    slowest_link_s: Duration = 0.0  # measured: a microbatch's uncompressed values over the slowest of its links
    founded: bool = False  # it began the run from the swarm's original parameters, so step 0 can be restored

    def check(self) -> None:
        inside = (self.start, *(unit for run in self.counted for unit in (run.start, run.end)), self.end)
        rules = {
            "units": self.start < self.end,
            "counted units that are not empty": all(run.start < run.end for run in self.counted),
            "counted units of its own, in order": all(left <= right for left, right in pairwise(inside)),
        }
        check_rules("STATUS", rules)


class Begin(Body, frozen=True):
    """Command to train this run from its step 0 on, with the current parameters."""

    run: EncodedRun


class Release(Body, frozen=True):
    """Command to forget these leases, and to answer STATUS: what they have counted stays counted, and they will count nothing
    more."""

    leases: Annotated[tuple[LeaseNumber, ...], Meta(max_length=MAX_LEASES)]
    run: RunId


class Discard(Body, frozen=True):
    """Command to forget everything counted in this step, and to answer STATUS."""

    run: RunId


class Commit(Body, frozen=True):
    """Command to update with the agreed gradients, whose norm over the whole model is `norm`. The step is over; its loss was
    `loss`.

    `beat_s`: seconds of computing of one microbatch on the slowest stage; no link need be faster. `slowest_link_s`: seconds of the
    microbatch's uncompressed values over the slowest of all links. 0: unknown.
    """

    step: Step
    norm: Norm
    run: RunId
    loss: Number = 0.0
    beat_s: Duration = 0.0
    slowest_link_s: Duration = 0.0


class Sync(Body, frozen=True):
    """Command to a stage that is behind: keep the agreed gradients from `step` on, fetch the state of that step or a later one from
    these peers, catch up, and answer STATUS."""

    run: EncodedRun
    step: Step
    peers: Annotated[tuple[Peer, ...], Meta(max_length=MAX_MEMBERS)]

    def check(self) -> None:
        check_rules("SYNC", {"peers that are named once": are_different(self.peers)})


class Restore(Body, frozen=True):
    """Command to go back to this step, as it is on the receiver's disk, and to answer STATUS."""

    run: EncodedRun
    step: Step


class Work(Body, frozen=True):
    """Offer of a trainer to feed this run, up to `want` microbatches at a time. It knows all steps below `since`."""

    run: EncodedRun
    want: Annotated[int, Meta(ge=1, le=MAX_FED)]
    since: Step = 0


class Lease(Body, frozen=True):
    """Command to a trainer to send a microbatch along a route of stages. Each lease is one attempt."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index
    route: Route
    run: RunId
    within_s: Duration = 0.0  # seconds after which the lease is called back
    seal: Seal = b""  # proves to hops that the lease was given to this trainer

    def check(self) -> None:
        check_route("LEASE", self.route)


class Done(Body, frozen=True):
    """Report that the microbatch went along the whole route and back."""

    lease: LeaseNumber
    loss: Number
    run: RunId
    expert_load: Load = 0.0  # of the BACKWARD


class Failed(Body, frozen=True):
    """Report that the lease (at a stage: the attempt to reduce) failed at `peer`, which may be empty, for the reason `code`."""

    lease: LeaseNumber
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)]
    code: Code
    unit: Block = -1  # -1: unknown
    run: AnyRunId = b""


class StepReport(Body, frozen=True):
    """Report of a committed step, with its `loss`, duration `step_s` and gradient `norm`. `expected_s` is the coordinator's
    estimate at its beginning; 0: none. `held_out_loss` is the mean loss of held-out data, by the parameters before the update, of
    the last step by the final ones; below 0: none. `expert_load` is that of the busiest expert over the mean of all, a mean over
    the microbatches; 0: unknown."""

    step: Step
    run: RunId
    loss: Number = 0.0
    step_s: Duration = 0.0
    norm: Norm = 0.0
    peers: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    expected_s: Duration = 0.0
    held_out_loss: Number = NOT_EVALUATED
    expert_load: Load = 0.0


class Wait(Body, frozen=True):
    """Peer that the step waits for, and since when.

    `what` is the kind of the unanswered command; LEASE: a microbatch is under way through the peer; 0: it failed and is left alone,
    and `since_s` are the seconds until it is asked again. FAILED: it cannot take up the run. WORK, without a peer: the peers are
    still coming to their places before the first step of a run.
    """

    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)]
    what: Code
    since_s: Duration = 0.0
    start: Unit = 0  # the peer's units
    end: Unit = 0


class ProgressReport(Body, frozen=True):
    """Progress of the step in force, sent each second: a coordinator that stays silent for some seconds is gone."""

    step: Step
    counted: Annotated[int, Meta(ge=0, le=8 * MAX_MASK_BYTES)] = 0  # microbatches that all units have counted
    missing: Annotated[tuple[Unit, ...], Meta(max_length=MAX_UNITS)] = ()  # units that no participant holds
    waits: Annotated[tuple[Wait, ...], Meta(max_length=MAX_WAITS)] = ()  # the longest first
    run: AnyRunId = b""
    left_out: Annotated[tuple[Peer, ...], Meta(max_length=MAX_LEFT_OUT)] = ()  # peers with false contributions


class Stopped(Body, frozen=True):
    """Report that the run is over: `code` 0 if all steps are done, else the reason and the layer (-1: unknown)."""

    step: Step
    run: RunId
    code: Code = 0
    unit: Block = -1


TRAINING_BODIES: dict[FrameKind, type[Body]] = {
    **AVERAGING_BODIES,
    FrameKind.FORWARD: Forward,
    FrameKind.LABELS: Labels,
    FrameKind.BACKWARD: Backward,
    FrameKind.LEAD: Lead,
    FrameKind.STATUS: Status,
    FrameKind.BEGIN: Begin,
    FrameKind.RELEASE: Release,
    FrameKind.DISCARD: Discard,
    FrameKind.COMMIT: Commit,
    FrameKind.SYNC: Sync,
    FrameKind.RESTORE: Restore,
    FrameKind.WORK: Work,
    FrameKind.LEASE: Lease,
    FrameKind.DONE: Done,
    FrameKind.FAILED: Failed,
    FrameKind.STEP: StepReport,
    FrameKind.STOPPED: Stopped,
    FrameKind.PROGRESS: ProgressReport,
}
