"""Bodies of the training conversations (`protocol/training.md`). The table of `docs/training-step.md` says which peer sends them to
which, and when.

One conversation carries one microbatch: FORWARD opens it with the whole route, BACKWARD ends it. Each body names its run, except
LEAD, which asks for it.

Fields of the bodies of training: their types, their bounds, and rules between them.

Bodies of an all-reduce (`protocol/training.md`); `docs/training-step.md` says when each is sent, and between which peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import (
    MAX_PEER_CHARS,
    MAX_RATE_BPS,
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
    first_broken,
)
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.tensors import Codec, TensorInfo, check_tensor, element_count
from swarmnode.errors import ErrorCode, ProtocolError

MAX_VALUES = 256  # tensors that cross one boundary
MAX_VALUE_ELEMENTS = 1 << 28  # in all these tensors: a few bytes of top-k can announce very many
MAX_MASK_BYTES = 256  # 2048 microbatches in a step: their losses and MAX_RANGES masks fit one body
MAX_RANGES = 96
MAX_MEMBERS = 64  # replicas that average together
MAX_CLUSTERS = 8  # of these members
MAX_RATES = 64  # of members' paths, in one report
MAX_PARTS = 1 << 20  # of a group's vector
MAX_PULLED = 64  # parts of each kind that may be on the way on one conversation
MAX_GROUPS = 64
MAX_KEPT_STEPS = 16
MAX_LEASES = 4096
MAX_FED = 256
MAX_BLOCKS = MAX_UNITS + 1
MAX_ATTEMPT = 1 << 31
MAX_ROUND = 64
MAX_TERM = 1 << 40
MAX_LEASE = 1 << 62
MAX_NORM = 1e100  # past any norm of float32 numbers, yet finite
MAX_DURATION_S = 1e9
MAX_LEFT_OUT = 16  # the newest ones are reported
MAX_WAITS = 16  # the longest ones are reported
RUN_ID_BYTES = 32
KEY_BYTES = 32
SEAL_BYTES = 16
LARGEST_LOSS = 2.0**128 * (1 - 2.0**-24)  # float32's: stages compute losses in it, and others only their means

Attempt = Annotated[int, Meta(ge=0, le=MAX_ATTEMPT)]
Duration = Annotated[float, Meta(ge=0, le=MAX_DURATION_S)]  # seconds
Index = Annotated[int, Meta(ge=0, lt=8 * MAX_MASK_BYTES)]
LeaseNumber = Annotated[int, Meta(ge=0, le=MAX_LEASE)]
Load = Annotated[float, Meta(ge=0, le=1 << 14)]  # of the busiest expert over the mean load; 0: unknown
Norm = Annotated[float, Meta(ge=0, le=MAX_NORM)]
Peer = Annotated[str, Meta(min_length=1, max_length=MAX_PEER_CHARS)]
Term = Annotated[int, Meta(ge=0, le=MAX_TERM)]
Number = Annotated[float, Meta(description="losses and squares: NaN and infinity tell something")]
Route = Annotated[tuple[HopSpec, ...], Meta(min_length=1, max_length=MAX_ROUTE_HOPS)]
Key = Annotated[bytes, Meta(max_length=KEY_BYTES)]
RunId = Annotated[bytes, Meta(min_length=RUN_ID_BYTES, max_length=RUN_ID_BYTES)]  # SHA-256 of the encoded run
AnyRunId = Annotated[bytes, Meta(max_length=RUN_ID_BYTES)]  # empty: none has begun
EncodedRun = Annotated[bytes, Meta(min_length=1, max_length=MAX_RUN_BYTES)]
Seal = Annotated[bytes, Meta(max_length=SEAL_BYTES)]
Values = Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_VALUES)]


def packed_mask(mask: int) -> bytes:
    """Return the bits of a mask of microbatches as bytes (little-endian), without zeros at its end."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def check_values(values: tuple[TensorInfo, ...]) -> None:
    """Raise ProtocolError if a descriptor is not valid, or the tensors are too large together."""
    elements = 0
    for info in values:
        check_tensor(info)
        elements += element_count(info.shape)
    if elements > MAX_VALUE_ELEMENTS:
        raise ProtocolError(
            f"values have {elements} elements; the bound is {MAX_VALUE_ELEMENTS}", code=ErrorCode.TOO_LARGE
        )


def check_rules(frame: str, rules: Mapping[str, bool]) -> None:
    """Raise ProtocolError for the first rule that is not kept; `frame` names the frame in its text."""
    if (broken := first_broken(rules)) is not None:
        raise ProtocolError(f"{'an' if frame[0] in 'AEIO' else 'a'} {frame} needs {broken}")


def check_route(frame: str, route: tuple[HopSpec, ...], hop: int = 0) -> None:
    """Raise ProtocolError if the spans of `route` are empty or do not follow one another, or `hop` is not a place in it."""
    rules = {
        "a place inside the route": hop < len(route),
        "spans that are not empty": all(hop.start < hop.end for hop in route),
        "spans that follow one another": all(left.end == right.start for left, right in pairwise(route)),
    }
    check_rules(frame, rules)


def are_different(items: Sequence[object]) -> bool:
    """Return whether no item occurs twice."""
    return len(set(items)) == len(items)


USUAL_SHARE, MOST_SHARE = 16, 64  # weights of a member's part of the vector to add up


class Form(Body, frozen=True):
    """Encoding of a contributor's values: the codec, and for top-k the share of the elements that are kept."""

    codec: Annotated[int, Meta(ge=0, le=255)] = Codec.NONE
    keep: Annotated[float, Meta(gt=0, le=1)] = 1.0


class MemberSpec(Body, frozen=True):
    """A replica in an all-reduce.

    `count` is the number of microbatches that it has counted; 0 if it only receives. `share` is the weight of the part of the
    vector that it adds up, relative to the other contributors. Members of one `cluster` are summed before anything leaves the
    cluster. `form` is the encoding of its contributions and of the sums that it makes, in a run that averages `by_line`.
    """

    peer: Peer
    count: Annotated[int, Meta(ge=0, le=8 * MAX_MASK_BYTES)]
    share: Annotated[int, Meta(ge=1, le=MOST_SHARE)] = USUAL_SHARE
    cluster: Annotated[int, Meta(ge=0, lt=MAX_CLUSTERS)] = 0
    form: Form = Form()


class How(IntEnum):
    """Way for the replicas of a group of layers to end a training step."""

    SUM = 0  # sum their gradients, and update alike
    APART = 1  # update by themselves, each with the mean of its own gradients
    AVERAGE = 2  # average the change of their parameters since the last averaging, then as APART


class Group(Body, frozen=True):
    """Blocks that the same replicas hold; together they have counted every microbatch of the step once.

    `warm_start`: all of them had the last sum of these blocks, and go on from its factors, if the run has them alternate.
    """

    number: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    blocks: Annotated[tuple[Block, ...], Meta(min_length=1, max_length=MAX_BLOCKS)]
    members: Annotated[tuple[MemberSpec, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    how: Annotated[int, Meta(ge=0, le=2)] = How.SUM
    warm_start: bool = False


class Reduce(Body, frozen=True):
    """Command to agree on the gradients of `step` with the members of each group. An earlier attempt is given up."""

    step: Step
    attempt: Attempt
    groups: Annotated[tuple[Group, ...], Meta(max_length=MAX_GROUPS)]
    run: RunId
    within_s: Duration = 0.0  # seconds after which the attempt is over

    def check(self) -> None:
        blocks = [block for group in self.groups for block in group.blocks]
        rules = {
            "groups of different numbers": are_different([group.number for group in self.groups]),
            "blocks of one group each": are_different(blocks),
            "members that are named once": all(
                are_different([member.peer for member in group.members]) for group in self.groups
            ),
            "a member that has counted something": all(
                any(member.count for member in group.members) for group in self.groups
            ),
            "a member that has counted something in each cluster": all(
                {member.cluster for member in group.members}
                == {member.cluster for member in group.members if member.count}
                for group in self.groups
            ),
        }
        check_rules("REDUCE", rules)


class PathRate(Body, frozen=True):
    """Rate of large frames received from `peer`, in bits/s."""

    peer: Peer
    received_bps: Annotated[float, Meta(gt=0, le=MAX_RATE_BPS)]


class Reduced(Body, frozen=True):
    """Report that the gradients are agreed.

    `squares` are their squared norms, one for each group. `suspect` is a peer whose contribution seems not to be its gradient.
    `rates` are the measured rates of the other members' paths to the sender.
    """

    step: Step
    attempt: Attempt
    squares: Annotated[tuple[Number, ...], Meta(max_length=MAX_GROUPS)]
    run: RunId
    suspect: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""
    rates: Annotated[tuple[PathRate, ...], Meta(max_length=MAX_RATES)] = ()


class Pull(Body, frozen=True):
    """Permission to send the puller further parts of an attempt to reduce: this number of `contributions` to the parts that it adds
    up, and of `sums`.

    Only parts that were pulled are sent. The two kinds are counted apart.
    """

    term: Term
    step: Step
    attempt: Attempt
    run: RunId
    contributions: Annotated[int, Meta(ge=0, le=MAX_PULLED)]
    sums: Annotated[int, Meta(ge=0, le=MAX_PULLED)]


class Part(Body, frozen=True):
    """Part of a group's vector in one round of the pulled attempt: a contribution, or (`agreed`) the final sum."""

    group: Annotated[int, Meta(ge=0, lt=MAX_GROUPS)]
    round: Annotated[int, Meta(ge=0, le=MAX_ROUND)]
    part: Annotated[int, Meta(ge=0, lt=MAX_PARTS)]
    agreed: bool
    values: Values
    run: RunId

    def check(self) -> None:
        check_values(self.values)


class Waiting(Body, frozen=True):
    """Sign that the sender still takes part in the attempt, and waits for `peer` (empty: for no peer)."""

    run: RunId
    peer: Annotated[str, Meta(max_length=MAX_PEER_CHARS)] = ""


AVERAGING_BODIES: dict[FrameKind, type[Body]] = {
    FrameKind.REDUCE: Reduce,
    FrameKind.REDUCED: Reduced,
    FrameKind.PULL: Pull,
    FrameKind.PART: Part,
    FrameKind.WAITING: Waiting,
}


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
