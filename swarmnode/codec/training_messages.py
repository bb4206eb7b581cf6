"""Bodies of the training conversations (`protocol/training.md`).

    trainer  -> coordinator   WORK ... DONE | FAILED         coordinator -> trainer   LEASE, STEP, STOPPED
    trainer  -> first hop   FORWARD                         hop -> who sent it     BACKWARD | FAULT
    coordinator -> stage      LEAD, BEGIN, RELEASE, DISCARD, REDUCE, COMMIT, SYNC, RESTORE
    coordinator -> everybody  PROGRESS, each second
    stage -> coordinator      STATUS, REDUCED, FAILED
    replica -> replica      PULL, WAITING           PART, WAITING, FAILED back

One conversation carries one microbatch: FORWARD opens it and says the whole route, BACKWARD ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import (
    MAX_PEER_CHARS,
    MAX_ROUTE_HOPS,
    MAX_RUN_BYTES,
    MAX_UNITS,
    Block,
    Body,
    Code,
    HopIndex,
    HopSpec,
    RunBytes,
    Step,
    Unit,
)
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.tensors import TensorInfo, check_tensor, element_count
from swarmnode.errors import ErrorCode, ProtocolError

MAX_VALUES = 256  # tensors that cross one boundary
MAX_VALUE_ELEMENTS = 1 << 28  # of them all; top-k says many in few bytes
MAX_MASK_BYTES = 256  # 2048 microbatches in a step: their losses and MAX_RANGES masks fit one body
MAX_RANGES = 96
MAX_MEMBERS = 64  # replicas that average together
MAX_PARTS = 1 << 20  # of a group's vector
MAX_PULLED = 64  # parts of each kind that may be on the way on one conversation
MAX_GROUPS = 64
MAX_KEPT_STEPS = 16
MAX_LEASES = 4096
MAX_WANTED = 256
MAX_BLOCKS = MAX_UNITS + 1
MAX_ATTEMPT = 1 << 31
MAX_ROUND = 64
MAX_TERM = 1 << 40
MAX_LEASE = 1 << 62
MAX_NORM = 1e100  # past any norm of float32 numbers, yet finite
MAX_DURATION_S = 1e9
MAX_WAITS = 16  # the longest ones are told
RUN_ID_BYTES = 32
KEY_BYTES = 32
SEAL_BYTES = 16

Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]  # seconds
Index = Annotated[int, Meta(ge=0, lt=8 * MAX_MASK_BYTES)]
LeaseNumber = Annotated[int, Meta(ge=0, le=MAX_LEASE)]
Norm = Annotated[float, Meta(ge=0, le=MAX_NORM)]
Peer = Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
Term = Annotated[int, Meta(ge=0, le=MAX_TERM)]
Number = Annotated[float, Meta(description="losses and squares: NaN and infinity tell something")]
Route = Annotated[tuple[HopSpec, ...], Meta(min_length=1, max_length=MAX_ROUTE_HOPS)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
RunId = Annotated[bytes, Meta(max_length=RUN_ID_BYTES)]  # SHA-256 of the encoded run; empty: none has begun
Seal = Annotated[bytes, Meta(max_length=SEAL_BYTES)]
Values = Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_VALUES)]


def _check_values(values: tuple[TensorInfo, ...]) -> None:
    elements = 0
    for info in values:
        check_tensor(info)
        elements += element_count(info.shape)
    if elements > MAX_VALUE_ELEMENTS:
        raise ProtocolError(
            f"values of {elements} elements; the bound is {MAX_VALUE_ELEMENTS}", code=ErrorCode.TOO_LARGE
        )


def _check(frame: str, rules: Mapping[str, bool]) -> None:
    for rule, kept in rules.items():
        if not kept:
            raise ProtocolError(f"a {frame} needs {rule}")


def _check_route(frame: str, route: tuple[HopSpec, ...], hop: int = 0) -> None:
    rules = {
        "a place inside the route": hop < len(route),
        "spans that are not empty": all(hop.start < hop.end for hop in route),
        "spans that follow one another": all(left.end == right.start for left, right in pairwise(route)),
    }
    _check(frame, rules)


def _different(items: Sequence[object]) -> bool:
    return len(set(items)) == len(items)


class Forward(Body, frozen=True):
    """One microbatch at the boundary before the receiver's units: the payload is the values' payloads, one after another."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index  # of the microbatch in its step
    route: Route
    hop: HopIndex  # the receiver's place in the route
    values: Values
    run: RunId = b""
    feeder: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""  # the trainer that holds the lease
    within_s: Duration = 0.0  # after which nobody waits for it any more
    seal: Seal = b""  # the lease's own

    def check(self) -> None:
        _check_route("FORWARD", self.route, self.hop)
        _check_values(self.values)


class Backward(Body, frozen=True):
    """The gradients of a FORWARD's values, in their order; `present` says which of them have one. Ends the conversation."""

    loss: Number
    present: Annotated[tuple[bool, ...], Meta(max_length=MAX_VALUES)]
    values: Values

    def check(self) -> None:
        _check("BACKWARD", {"a gradient for each value that it names": sum(self.present) == len(self.values)})
        _check_values(self.values)


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
    unit_s: Duration = 0.0  # measured: one microbatch through one unit, forward and back
    in_flight: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # how many microbatches fit at once; 0: as many as come

    def check(self) -> None:
        inside = (self.start, *(unit for run in self.counted for unit in (run.start, run.end)), self.end)
        rules = {
            "units": self.start < self.end,
            "counted units that are not empty": all(run.start < run.end for run in self.counted),
            "counted units of its own, in order": all(left <= right for left, right in pairwise(inside)),
        }
        _check("STATUS", rules)


class Begin(Body, frozen=True):
    """Train this run from its step 0 on, with the parameters as they are."""

    run: Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]


class Release(Body, frozen=True):
    """Forget these leases, and answer STATUS: what is counted then stays counted, what is not never will be by them."""

    leases: Annotated[tuple[LeaseNumber, ...], Meta(max_length=MAX_LEASES)]
    run: RunId = b""


class Discard(Body, frozen=True):
    """Forget all that was counted in this step, and answer STATUS."""

    run: RunId = b""


class MemberSpec(Body, frozen=True):
    """A replica in an all-reduce. `count` is how many microbatches it has counted; 0: it only listens."""

    peer: Peer
    count: Annotated[int, Meta(ge=0, le=8 * MAX_MASK_BYTES)]


class How(IntEnum):
    """What the replicas of a group do at the end of a step."""

    SUM = 0  # sum their gradients, and update alike
    APART = 1  # update by themselves, each with the mean of its own gradients
    AVERAGE = 2  # average how far their parameters came since the last averaging, then as APART


class Group(Body, frozen=True):
    """Blocks that the same replicas hold: together they have counted every microbatch of the step once."""

    number: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    blocks: Annotated[tuple[Block, ...], Meta(min_length=1, max_length=MAX_BLOCKS)]
    members: Annotated[tuple[MemberSpec, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    how: Annotated[int, Meta(ge=0, le=2)] = How.SUM


class Reduce(Body, frozen=True):
    """Agree on the gradients of `step` with the members of each group. An earlier attempt is given up."""

    step: Step
    attempt: Attempt
    groups: Annotated[tuple[Group, ...], Meta(max_length=MAX_GROUPS)]
    run: RunId = b""
    within_s: Duration = 0.0  # after which the attempt is over

    def check(self) -> None:
        blocks = [block for group in self.groups for block in group.blocks]
        rules = {
            "groups of different numbers": _different([group.number for group in self.groups]),
            "blocks of one group each": _different(blocks),
            "members that are named once": all(
                _different([member.peer for member in group.members]) for group in self.groups
            ),
            "a member that has counted something": all(
                any(member.count for member in group.members) for group in self.groups
            ),
        }
        _check("REDUCE", rules)


class Reduced(Body, frozen=True):
    """The gradients are agreed; `squares` are their squared norms, one for each group."""

    step: Step
    attempt: Attempt
    squares: Annotated[tuple[Number, ...], Meta(max_length=MAX_GROUPS)]
    run: RunId = b""


class Pull(Body, frozen=True):
    """Send so many parts more of an attempt to reduce: contributions to what the receiver owns, and sums. Nothing is sent that was
    not pulled, and neither kind takes the place of the other."""

    term: Term
    step: Step
    attempt: Attempt
    contributions: Annotated[int, Meta(ge=0, le=MAX_PULLED)]
    sums: Annotated[int, Meta(ge=0, le=MAX_PULLED)]


class Part(Body, frozen=True):
    """A part of a group's vector in one round of the attempt that was pulled: a contribution, or (`agreed`) the sum that counts."""

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    round: Annotated[int, Meta(ge=0, le=MAX_ROUND)]
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    agreed: bool
    values: Values
    run: RunId = b""

    def check(self) -> None:
        _check_values(self.values)


class Waiting(Body, frozen=True):
    """The sender still takes part in the attempt, and is held up by `peer` (empty: by nobody)."""

    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""


class Commit(Body, frozen=True):
    """Update with the agreed gradients, whose norm over the whole model is `norm`; the step is over, its loss was `loss`.

    `beat_s`: seconds of computing that one microbatch costs the slowest stage; no link need be faster. 0: not known yet.
    """

    step: Step
    norm: Norm
    loss: Number = 0.0
    beat_s: Duration = 0.0
    run: RunId = b""


class Sync(Body, frozen=True):
    """The receiver is behind: keep what is agreed from `step` on, fetch the state of that step or later from these peers,
    catch up, and answer STATUS."""

    run: Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]
    step: Step
    peers: Annotated[tuple[Peer, ...], Meta(max_length=MAX_MEMBERS)]

    def check(self) -> None:
        _check("SYNC", {"peers that are named once": _different(self.peers)})


class Restore(Body, frozen=True):
    """Go back to this step, as it is on the receiver's disk, and answer STATUS."""

    run: Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]
    step: Step


class Work(Body, frozen=True):
    """A trainer offers to feed this run, up to `want` microbatches at a time; it has heard of all steps below `since`."""

    run: Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]
    want: Annotated[int, Meta(ge=1, le=MAX_WANTED)]
    since: Step = 0


class Lease(Body, frozen=True):
    """One attempt at a microbatch, for the trainer to feed along this route."""

    term: Term
    lease: LeaseNumber
    step: Step
    number: Index
    route: Route
    run: RunId = b""
    within_s: Duration = 0.0  # after which it is called back
    seal: Seal = b""  # by which hops know that it was given to this trainer

    def check(self) -> None:
        _check_route("LEASE", self.route)


class Done(Body, frozen=True):
    """The microbatch went along the whole route and back."""

    lease: LeaseNumber
    loss: Number
    run: RunId = b""


class Failed(Body, frozen=True):
    """The lease (or for a stage: the attempt to reduce) failed at `peer`, which may be empty, for the reason `code`."""

    lease: LeaseNumber
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)]
    code: Code
    unit: Block = -1  # where it is known
    run: RunId = b""


class StepReport(Body, frozen=True):
    """A step was committed; `loss`, `step_s`, `norm` are its own."""

    step: Step
    loss: Number = 0.0
    step_s: Duration = 0.0
    norm: Norm = 0.0
    peers: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    run: RunId = b""


class Wait(Body, frozen=True):
    """A peer that something is expected of, for `since_s` seconds: the answer to a command of kind `what` (LEASE: that it is
    fed, FORWARD: a microbatch, DISCARD: nothing; it failed and is left alone)."""

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
    run: RunId = b""


class Stopped(Body, frozen=True):
    """The run is over: `code` 0 when all steps are done, else why it cannot go on, and at which unit (-1: unknown)."""

    step: Step
    code: Code = 0
    unit: Block = -1
    run: RunId = b""


TRAINING_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.FORWARD: Forward,
    FrameKind.BACKWARD: Backward,
    FrameKind.LEAD: Lead,
    FrameKind.STATUS: Status,
    FrameKind.BEGIN: Begin,
    FrameKind.RELEASE: Release,
    FrameKind.DISCARD: Discard,
    FrameKind.REDUCE: Reduce,
    FrameKind.REDUCED: Reduced,
    FrameKind.PULL: Pull,
    FrameKind.PART: Part,
    FrameKind.WAITING: Waiting,
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
