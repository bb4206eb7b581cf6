"""Bodies of an all-reduce (`protocol/training.md`); `docs/training-step.md` says when each is sent, and between which peers."""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from swarmnode.codec.body import MAX_PEER_CHARS, MAX_RATE_BPS, Block, Body, Step
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_fields import (
    MAX_BLOCKS,
    MAX_CLUSTERS,
    MAX_GROUPS,
    MAX_MASK_BYTES,
    MAX_MEMBERS,
    MAX_PARTS,
    MAX_PULLED,
    MAX_RATES,
    MAX_ROUND,
    Attempt,
    Duration,
    Number,
    Peer,
    RunId,
    Term,
    Values,
    are_different,
    check_rules,
    check_values,
)

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
