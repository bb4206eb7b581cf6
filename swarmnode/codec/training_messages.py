"""Bodies of the training conversations (`protocol/training.md`). The table of `docs/training-step.md` says which peer sends them to
which, and when.

One conversation carries one microbatch: FORWARD opens it and says the whole route, BACKWARD ends it. Each names its run, but LEAD,
which asks for it. All-reduces have bodies of their own (`averaging_messages.py`).
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


class Forward(Body, frozen=True):
    """One microbatch at the boundary before the receiver's units: the payload is the values' payloads, one after another."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index  # of the microbatch in its step
    route: Route
    hop: HopIndex  # the receiver's place in the route
    values: Values
    run: RunId
    feeder: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""  # the trainer that holds the lease
    within_s: Duration = 0.0  # after which nobody waits for it any more
    seal: Seal = b""  # the lease's own

    @property
    def sender(self) -> str:
        """Whose it has to be."""
        return self.route[self.hop - 1].peer if self.hop else self.feeder

    def check(self) -> None:
        check_route("FORWARD", self.route, self.hop)
        check_values(self.values)


class Labels(Body, frozen=True):
    """What the loss of a microbatch needs besides, for the last hop of its route alone: the payload is the values' payloads, one
    after another. The trainer ends the conversation when the microbatch is over."""

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
        """The receiver's place in the route."""
        return len(self.route) - 1

    @property
    def sender(self) -> str:
        """Whose it has to be."""
        return self.feeder

    def check(self) -> None:
        check_route("LABELS", self.route)
        check_values(self.values)


class Backward(Body, frozen=True):
    """The gradients of a FORWARD's values, in their order; `present` says which of them have one. Ends the conversation."""

    loss: Number
    present: Annotated[tuple[bool, ...], Meta(max_length=MAX_VALUES)]
    values: Values
    run: RunId

    def check(self) -> None:
        check_rules("BACKWARD", {"a gradient for each value that it names": sum(self.present) == len(self.values)})
        check_values(self.values)


class Lead(Body, frozen=True):
    """The sender leads from now on. A stage follows the highest term that it has heard, and answers STATUS."""

    term: Term
    key: Key = b""  # of the seals of this term's leases


class Condition(IntEnum):
    """Of a stage's units."""

    BLANK = 0  # as the swarm was founded: no run has begun
    READY = 1  # at `step`, able to work
    LISTENING = 2  # behind the others, on the way


class Counted(Body, frozen=True):
    """Units [start, end) have counted the microbatches of the bits set in `mask` (little-endian)."""

    start: Unit
    end: Unit
    mask: Annotated[bytes, Meta(max_length=MAX_MASK_BYTES)]


class Status(Body, frozen=True):
    """What a stage holds. `reduced` says that the gradients of `step` are agreed, so that COMMIT is all that is missing."""

    term: Term
    condition: Code
    start: Unit
    end: Unit
    run: RunBytes = b""
    step: Step = 0
    counted: Annotated[tuple[Counted, ...], Meta(max_length=MAX_RANGES)] = ()
    kept: Annotated[tuple[Step, ...], Meta(max_length=MAX_KEPT_STEPS)] = ()  # on its disk
    reduced: bool = False
    losses: Annotated[tuple[Number, ...], Meta(max_length=8 * MAX_MASK_BYTES)] = ()  # of what the last unit counted
    norm: Norm = 0.0  # of the gradient that led to `step`
    loss: Number = 0.0  # of the step before `step`
    answers: Code = 0  # the kind of the command that this answers; 0: told unasked
    unit_s: Duration = 0.0  # one microbatch through one unit, forward and back: measured, or until then estimated
    window: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # microbatches that it has room for at once; 0: not known
    slowest_link_s: Duration = 0.0  # measured: a microbatch's values, uncompressed, over the slowest of its links
    founded: bool = False  # it began the run, with what the swarm was founded with: its step 0 can be had again

    def check(self) -> None:
        inside = (self.start, *(unit for run in self.counted for unit in (run.start, run.end)), self.end)
        rules = {
            "units": self.start < self.end,
            "counted units that are not empty": all(run.start < run.end for run in self.counted),
            "counted units of its own, in order": all(left <= right for left, right in pairwise(inside)),
        }
        check_rules("STATUS", rules)


class Begin(Body, frozen=True):
    """Train this run from its step 0 on, with the parameters as they are."""

    run: EncodedRun


class Release(Body, frozen=True):
    """Forget these leases, and answer STATUS: what is counted then stays counted, what is not never will be by them."""

    leases: Annotated[tuple[LeaseNumber, ...], Meta(max_length=MAX_LEASES)]
    run: RunId


class Discard(Body, frozen=True):
    """Forget all that was counted in this step, and answer STATUS."""

    run: RunId


class Commit(Body, frozen=True):
    """Update with the agreed gradients, whose norm over the whole model is `norm`; the step is over, its loss was `loss`.

    `beat_s`: seconds of computing that one microbatch costs the slowest stage; no link need be faster. `slowest_link_s`: what its
    values, uncompressed, take over the slowest link of all. 0: not known yet.
    """

    step: Step
    norm: Norm
    run: RunId
    loss: Number = 0.0
    beat_s: Duration = 0.0
    slowest_link_s: Duration = 0.0


class Sync(Body, frozen=True):
    """The receiver is behind: keep what is agreed from `step` on, fetch the state of that step or later from these peers,
    catch up, and answer STATUS."""

    run: EncodedRun
    step: Step
    peers: Annotated[tuple[Peer, ...], Meta(max_length=MAX_MEMBERS)]

    def check(self) -> None:
        check_rules("SYNC", {"peers that are named once": are_different(self.peers)})


class Restore(Body, frozen=True):
    """Go back to this step, as it is on the receiver's disk, and answer STATUS."""

    run: EncodedRun
    step: Step


class Work(Body, frozen=True):
    """A trainer offers to feed this run, up to `want` microbatches at a time; it has heard of all steps below `since`."""

    run: EncodedRun
    want: Annotated[int, Meta(ge=1, le=MAX_FED)]
    since: Step = 0


class Lease(Body, frozen=True):
    """One attempt at a microbatch, for the trainer to feed along this route."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index
    route: Route
    run: RunId
    within_s: Duration = 0.0  # after which it is called back
    seal: Seal = b""  # by which hops know that it was given to this trainer

    def check(self) -> None:
        check_route("LEASE", self.route)


class Done(Body, frozen=True):
    """The microbatch went along the whole route and back."""

    lease: LeaseNumber
    loss: Number
    run: RunId


class Failed(Body, frozen=True):
    """The lease (or for a stage: the attempt to reduce) failed at `peer`, which may be empty, for the reason `code`."""

    lease: LeaseNumber
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)]
    code: Code
    unit: Block = -1  # where it is known
    run: AnyRunId = b""


class StepReport(Body, frozen=True):
    """A step was committed; `loss`, `step_s`, `norm` are its own. `expected_s`: what the coordinator expected of it when it began;
    0: nothing."""

    step: Step
    run: RunId
    loss: Number = 0.0
    step_s: Duration = 0.0
    norm: Norm = 0.0
    peers: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    expected_s: Duration = 0.0


class Wait(Body, frozen=True):
    """A peer that something is expected of, for `since_s` seconds: the answer to a command of kind `what` (LEASE: that it is
    fed, FORWARD: a microbatch, DISCARD: nothing; it failed and is left alone). WORK: without a peer, that all have come to their
    places, before the first step of a run."""

    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)]
    what: Code
    since_s: Duration = 0.0
    start: Unit = 0  # the peer's units
    end: Unit = 0


class ProgressReport(Body, frozen=True):
    """How the step in force goes. Told each second: a coordinator that has not said anything for some is gone."""

    step: Step
    counted: Annotated[int, Meta(ge=0, le=8 * MAX_MASK_BYTES)] = 0  # microbatches that all units have counted
    missing: Annotated[tuple[Unit, ...], Meta(max_length=MAX_UNITS)] = ()  # units that nobody holds who takes part
    waits: Annotated[tuple[Wait, ...], Meta(max_length=MAX_WAITS)] = ()  # the longest first
    run: AnyRunId = b""
    left_out: Annotated[tuple[Peer, ...], Meta(max_length=MAX_LEFT_OUT)] = ()  # contributed what is not their gradient


class Stopped(Body, frozen=True):
    """The run is over: `code` 0 when all steps are done, else why it cannot go on, and at which unit (-1: unknown)."""

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
