"""Expert parallelism: seconds of a mixture's layers on a group of machines, in a pipeline, and on machines by themselves.

Costs are of the alpha–beta kind: a message takes a delay, busy time at its sender, and time by its bytes. Schedules place the
exchanges of three kinds of parallelism as in Parm (arXiv 2407.00599): members with the same tokens (`same`, MP), experts divided
among members (EP), and experts cut into shards (`shards`, ESP). A group has `machines` equal machines with `cards` members each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import partial
from itertools import permutations

import numpy as np

from swarmnode.errors import UsageError
from swarmnode.plan.cost import step_s, transfer_s
from swarmnode.plan.spans.flow import Floats

BACKWARD = 2.0  # computing of a backward pass relative to the forward pass
TRAINING_BYTES = 16  # of a parameter: float32 weight, gradient and AdamW's moments
CHUNKS = (1, 2, 4, 8)  # of a layer's tokens
MAX_MACHINES = 8  # that are tried as one group
MESSAGE_S = 0.3e-3  # preparing a message in Python and handing it over (docs/decisions/direct.md)
PIECES = (*CHUNKS, 16, 32)  # of the work in a pipeline
MARGIN = 1.15  # least gain of a group that counts: more than the error of the model (docs/decisions/expert-groups.md)


class WorkKind(Enum):
    """Kind of work that a mixture does."""

    DECODING = "decoding"
    PROMPTS = "prompts"
    TRAINING = "training"


def _check(owner: object, least: float, names: Sequence[str]) -> None:
    """Raise UsageError unless each field in `names` is a number of at least `least`; infinity and NaN are none."""
    for name in names:
        value = getattr(owner, name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= least):
            raise UsageError(f"{name} is {value}; it must be a finite number of at least {least:g}")


@dataclass(frozen=True)
class LinkCost:
    """Link class: one-way delay, busy seconds of each message at its sender, and bytes per second; rates of 0 are unmeasured."""

    delay_s: float
    message_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _check(self, 0, [each.name for each in fields(self)])

    def sending_s(self, size_bytes: float) -> float:
        """Return the seconds that the bytes alone take; 0 on an unmeasured link."""
        return size_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    def busy_s(self, messages: float, size_bytes: float, senders: int = 1) -> float:
        """Return the seconds that `senders` take for `messages` each over one line; one is prepared while others are sent."""
        first_s = min(1.0, messages) * self.message_s
        return first_s + max(messages * self.message_s - first_s, senders * self.sending_s(size_bytes))


CARDS = LinkCost(10e-6, 20e-6, 12e9)  # cards of one machine on PCIe 4.0 x16
LOOPBACK = LinkCost(0.0, MESSAGE_S, 1.3e9)  # sealed streams between two processes
LAN = LinkCost(0.1e-3, MESSAGE_S, 0.117e9)  # 1 Gbit/s
WAN = LinkCost(10e-3, MESSAGE_S, 12.5e6)  # 100 Mbit/s


@dataclass(frozen=True)
class ExpertMixture:
    """Sizes of a mixture with equal layers, without embedding and head. Raises UsageError if they contradict one another.

    `expert_parameters` are of one expert, `dense_parameters` of all else in a layer, shared experts included. `weight_bytes` are
    of a parameter in memory, `value_bytes` of a value between machines.
    """

    layers: int
    hidden: int
    experts: int
    active: int
    expert_parameters: float
    dense_parameters: float
    weight_bytes: float = 2.0
    value_bytes: float = 2.0

    def __post_init__(self) -> None:
        _check(self, 1, ("layers", "hidden", "experts", "active", "expert_parameters"))
        _check(self, 0, ("dense_parameters", "weight_bytes", "value_bytes"))
        if self.active > self.experts:
            raise UsageError(f"{self.active} experts are active in a token, but a layer has {self.experts}")

    def needs(self, held: float) -> float:
        """Return the chance that a token needs any of `held` given experts, if its active ones are drawn at random."""
        missed = (max(0.0, 1 - held / (self.experts - number)) for number in range(self.active))
        return 1 - math.prod(missed)


@dataclass(frozen=True)
class GroupMachine:
    """Speeds and memory of one member. Experts beyond `memory_bytes` are read at `spill_bytes_per_s` from host memory or disk.

    A `memory_bytes` of 0 holds everything; a `spill_bytes_per_s` of 0 is no such tier; other speeds of 0 are unmeasured and take
    no time. `pass_s` is spent in each layer, half in its dense part and half in its experts.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    memory_bytes: float = 0.0
    spill_bytes_per_s: float = 0.0
    pass_s: float = 0.0

    def __post_init__(self) -> None:
        _check(self, 0, [each.name for each in fields(self)])

    def product_s(self, tokens: float, parameters: float, read_bytes: float, resident: float = 1.0) -> float:
        """Return the seconds of products of `tokens` with `parameters` weights; `read_bytes` of weights are read once.

        The share `resident` of these bytes is in memory. Returns infinity if the rest has no tier, or if `resident` is negative.
        """
        arithmetic_s = 2 * tokens * parameters / self.flops_per_s if self.flops_per_s else 0.0
        reading_s = resident * read_bytes / self.memory_bytes_per_s if self.memory_bytes_per_s else 0.0
        if resident < 1:
            if resident < 0 or not self.spill_bytes_per_s:
                return math.inf
            reading_s += (1 - resident) * read_bytes / self.spill_bytes_per_s
        return self.pass_s / 2 + max(arithmetic_s, reading_s)

    def dense_s(self, mixture: ExpertMixture, tokens: float, cut: int = 1) -> float:
        """Return the seconds of a layer's dense part, or of one of `cut` equal parts of it."""
        parameters = mixture.dense_parameters / cut
        return self.product_s(tokens, parameters, parameters * mixture.weight_bytes)

    def resident(self, mixture: ExpertMixture, layers: int, cut: int, *, trains: bool) -> float:
        """Return the share of the experts of `layers` layers, cut among `cut` members, that memory holds beside the dense parts.

        It is negative if the dense parts alone do not fit.
        """
        width = TRAINING_BYTES if trains else mixture.weight_bytes
        experts_bytes = layers * mixture.experts * mixture.expert_parameters / cut * width
        room_bytes = self.memory_bytes - layers * mixture.dense_parameters * width
        return min(1.0, room_bytes / experts_bytes) if self.memory_bytes else 1.0


@dataclass(frozen=True)
class GroupNetwork:
    """Machines on `link`, each with `cards` members on `inner`. Raises UsageError if there are fewer than two members."""

    machines: int
    link: LinkCost
    cards: int = 1
    inner: LinkCost = CARDS

    def __post_init__(self) -> None:
        _check(self, 1, ("machines", "cards"))
        if self.members < 2:
            raise UsageError("1 machine with 1 card is no group; give at least 2 machines or cards")

    @property
    def members(self) -> int:
        """Number of members of the group."""
        return self.machines * self.cards

    def exchange(self, members: int, tokens: float, token_bytes: float = 1.0) -> ExpertPhase:
        """Return the phase of an exchange: each of `members` neighbours sends `tokens` to each other one, all at once.

        It is an all-to-all with different data for each receiver, an all-gather with the same, and a reduce-scatter of parts. The
        cards of a machine share its line. Messages are fewer if `tokens`, an average, is below 1.
        """
        near = min(members, self.cards) - 1
        far = members - 1 - near
        sent, size_bytes = min(1.0, tokens), tokens * token_bytes
        return ExpertPhase(
            inner_s=self.inner.busy_s(near * sent, near * size_bytes),
            line_s=self.link.busy_s(far * sent, far * size_bytes, self.cards),
            delay_s=self.link.delay_s if far else self.inner.delay_s if near else 0.0,
        )


@dataclass(frozen=True)
class ExpertPhase:
    """Phase of a schedule: busy seconds of computing, of the line between machines and of the links within one, and a
    delay."""

    compute_s: float = 0.0
    line_s: float = 0.0
    inner_s: float = 0.0
    delay_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the phase by itself."""
        return max(self.compute_s, self.line_s, self.inner_s) + self.delay_s


def chunked_s(phases: Sequence[ExpertPhase], chunks: int) -> float:
    """Return the seconds of `chunks` chunks that each pass `phases` in turn, while other chunks use the other resources.

    Either the slowest phase of one chunk after another decides, or the resource that all phases together use longest.
    """
    if chunks == 1:
        return sum(phase.seconds for phase in phases)
    busy_s = [max(phase.compute_s, phase.line_s, phase.inner_s) for phase in phases]
    used_s = (sum(float(getattr(phase, name)) for phase in phases) for name in ("compute_s", "line_s", "inner_s"))
    one_by_one_s = sum(phase.seconds for phase in phases) + (chunks - 1) * max(busy_s)
    return float(max(one_by_one_s, chunks * max(used_s) + phases[-1].delay_s))


def experts_part_s(
    mixture: ExpertMixture, machine: GroupMachine, tokens: float, resident: float, divided: int = 1, shards: int = 1
) -> float:
    """Return the seconds of the busiest of `divided` parts of a layer's experts, each cut among `shards` members.

    Counts spread by chance: the largest of n is about sqrt(ln n) deviations above the mean.
    """
    held, pairs = mixture.experts / divided, tokens * mixture.active / divided
    missed = (1 - mixture.active / mixture.experts) ** tokens
    deviations = math.sqrt(math.log(divided))
    busiest = min(tokens * mixture.active, pairs + deviations * math.sqrt(pairs * (1 - 1 / divided)))
    touched = min(held, held * (1 - missed) + deviations * math.sqrt(held * missed * (1 - missed)))
    size = mixture.expert_parameters / shards
    return machine.product_s(busiest, size, touched * size * mixture.weight_bytes, resident)


def local_layer_s(mixture: ExpertMixture, machine: GroupMachine, tokens: float, resident: float) -> float:
    """Return the seconds of a layer, forward, on one machine that holds all of it."""
    return machine.dense_s(mixture, tokens) + experts_part_s(mixture, machine, tokens, resident)


@dataclass(frozen=True)
class ExpertSchedule:
    """Schedule of a layer's experts: `ep`, `esp`, `s1`, `s2` or `sum`, with experts cut into `shards`, in `chunks` chunks.

    - `ep`: each member sends the tokens that it holds to the experts' members and gets results back.
    - `esp`: every expert is cut into a shard per member; tokens are gathered, and partial results scattered.
    - `s1`: members with the same tokens split them before the router, and gather the results at the end.
    - `s2`: they split them behind the router, and gather each result while others are still on their way.
    - `sum`: all members have all tokens; each computes its own experts, and partial results are summed.
    """

    name: str
    shards: int = 1
    chunks: int = 1

    def __str__(self) -> str:
        shards = f" of {self.shards} shards" if self.shards > 1 else ""
        return f"{self.name}{shards}" + (f" in {self.chunks} chunks" if self.chunks > 1 else "")


@dataclass(frozen=True)
class LayerOnGroup:
    """Layer of a mixture on a group whose members hold `tokens` tokens together; each `same` neighbours hold the same ones."""

    mixture: ExpertMixture
    machine: GroupMachine
    network: GroupNetwork
    tokens: float
    same: int = 1
    resident: float = 1.0  # share of a member's experts that its memory holds

    def schedules(self) -> Iterator[ExpertSchedule]:
        """Yield the schedules that this group can run."""
        members, cards = self.network.members, self.network.cards
        kinds = [("ep", 1), ("esp", members)]
        if self.same > 1:
            kinds += [(name, shards) for name in ("s1", "s2") for shards in {1, cards} if shards < members]
        if self.same == members:
            kinds += [("sum", shards) for shards in {1, cards, members}]
        for name, shards in kinds:
            yield from (ExpertSchedule(name, shards, count) for count in CHUNKS if count <= max(1, self.tokens))

    def experts_s(self, schedule: ExpertSchedule, backward: float = 1.0) -> float:
        """Return the seconds from the router to the sum of all results, for one direction; `backward` scales the computing."""
        mixture, network, chunks = self.mixture, self.network, schedule.chunks
        members, divided = network.members, network.members // schedule.shards
        token_bytes = mixture.hidden * mixture.value_bytes
        part = self.tokens / chunks
        own = part / members  # of a member, once tokens are split
        needed = mixture.needs(mixture.experts / divided)
        repeats = self.same if schedule.name in ("ep", "esp") else 1  # tokens were not split
        swap = network.exchange(members, needed * own * repeats, token_bytes)
        pieces = needed * divided if schedule.name == "s2" else 1.0  # partial results of a token that are gathered
        gather = network.exchange(self.same, pieces * own, token_bytes)
        passed = repeats * part, self.resident, divided, schedule.shards
        compute = ExpertPhase(compute_s=backward * experts_part_s(mixture, self.machine, *passed))
        ways = {"s2": (swap, compute, swap, gather), "sum": (compute, swap, gather)}
        seconds = chunked_s(ways.get(schedule.name, (swap, compute, swap)), chunks)
        last = network.exchange(self.same, chunks * own, token_bytes) if schedule.name == "s1" else ExpertPhase()
        return seconds + last.seconds

    def dense_s(self, backward: float = 1.0) -> float:
        """Return the seconds of all but experts: each member for itself, or cut among the `same` members, which then sum."""
        mixture, tokens = self.mixture, self.tokens * self.same / self.network.members
        whole_s, cut_s = (backward * self.machine.dense_s(mixture, tokens, cut) for cut in (1, self.same))
        part = self.network.exchange(self.same, tokens / self.same, mixture.hidden * mixture.value_bytes)
        return min(whole_s, cut_s + 2 * part.seconds)

    def seconds(self, schedule: ExpertSchedule, *, trains: bool = False) -> float:
        """Return the seconds of the layer: forward, and with `trains` the way back, whose exchanges are as large."""
        forward_s = self.dense_s() + self.experts_s(schedule)
        return forward_s + (self.dense_s(BACKWARD) + self.experts_s(schedule, BACKWARD) if trains else 0.0)

    def choose(self, *, trains: bool = False) -> ExpertSchedule:
        """Return the fastest schedule; of equal ones the first with the fewest chunks."""
        return min(self.schedules(), key=partial(self.seconds, trains=trains))


@dataclass(frozen=True)
class GroupWork:
    """Work to compare: `sequences` sessions that write one token each, prompts of `tokens` tokens, or microbatches of a step."""

    kind: WorkKind
    sequences: int
    tokens: int = 1

    def __post_init__(self) -> None:
        _check(self, 1, ("sequences", "tokens"))

    def __str__(self) -> str:
        if self.kind is WorkKind.TRAINING:
            return f"training ({self.sequences} microbatches of {self.tokens:,} tokens)"
        length = f" of {self.tokens:,} tokens" if self.kind is WorkKind.PROMPTS else ""
        return f"{self.kind.value}{length} ({self.sequences} at once)"


@dataclass(frozen=True)
class ExpertComparison:
    """Seconds of the same work in a group, in a pipeline, and on machines that each hold the whole model; infinite if the
    model has no place."""

    network: GroupNetwork
    work: GroupWork
    schedule: ExpertSchedule
    group_s: float
    pipeline_s: float
    alone_s: float

    @property
    def gain(self) -> float:
        """Speed of the group relative to the faster one of the others; infinite if only the group holds the model, 0 if it does
        not."""
        other_s = min(self.pipeline_s, self.alone_s)
        return 0.0 if math.isinf(self.group_s) else other_s / self.group_s

    @property
    def pays(self) -> bool:
        """Whether the group is faster by more than the error of the model."""
        return self.gain > MARGIN

    def __str__(self) -> str:
        link, network = self.network.link, self.network
        apart = f"at {8e-9 * link.bytes_per_s:.3g} Gbit/s" if link.bytes_per_s else f"{1e3 * link.delay_s:.3g} ms apart"
        who = f"{network.machines} machines" + (f" of {network.cards} cards" if network.cards > 1 else "")
        other = "a pipeline" if self.pipeline_s <= self.alone_s else "each machine by itself"
        begin = f"{self.work}, {who} {apart}: "
        if math.isinf(min(self.group_s, self.pipeline_s, self.alone_s)):
            return f"{begin}they do not hold the model, in a group or otherwise"
        if math.isinf(self.gain):
            return f"{begin}only a group, by {self.schedule}, holds the model"
        if self.pays:
            return f"{begin}a group by {self.schedule} is {self.gain:.3g} times faster than {other}"
        if self.gain >= 1:
            return f"{begin}no group; it would be only {self.gain:.3g} times faster than {other}"
        return f"{begin}no group; {other} is " + (f"{1 / self.gain:.3g} times faster" if self.gain else "possible")

    def summary(self) -> dict[str, object]:
        """Return the comparison as JSON values; seconds that are infinite are None."""
        times = {name: getattr(self, name) for name in ("group_s", "pipeline_s", "alone_s")}
        finite = {name: None if math.isinf(seconds) else seconds for name, seconds in times.items()}
        return {"work": str(self.work), "group": self.pays, "schedule": str(self.schedule), **finite, "says": str(self)}


def compare_nearest(
    mixture: ExpertMixture,
    machines: Sequence[GroupMachine],
    delay_s: Floats,
    bandwidth_bps: Floats,
    work: GroupWork,
) -> ExpertComparison:
    """Compare groups of up to `MAX_MACHINES` of at least two `machines`; return the comparison with the largest gain.

    Each group begins with the two machines that exchange a microbatch fastest, and grows by the nearest others. It counts with its
    slowest link and its slowest machine. `delay_s` and `bandwidth_bps` are [D, D]; their diagonals mean nothing.
    """
    size_bytes = work.sequences * work.tokens * mixture.hidden * mixture.value_bytes
    apart_s = transfer_s(size_bytes, delay_s, bandwidth_bps)
    apart_s = np.maximum(apart_s, apart_s.T)
    np.fill_diagonal(apart_s, np.inf)
    group = [int(place) for place in np.unravel_index(apart_s.argmin(), apart_s.shape)]
    compared = list[ExpertComparison]()
    while True:
        here, there = max(permutations(group, 2), key=lambda pair: apart_s[pair])
        link = LinkCost(float(delay_s[here, there]), MESSAGE_S, float(bandwidth_bps[here, there]) / 8)
        weakest = (min(getattr(machines[one], each.name) for one in group) for each in fields(GroupMachine))
        compared.append(compare(mixture, GroupMachine(*weakest), GroupNetwork(len(group), link), work))
        if len(group) == min(MAX_MACHINES, len(machines)):
            return max(compared, key=lambda each: each.gain)
        farthest_s = apart_s[:, group].max(1)
        farthest_s[group] = np.inf
        group.append(int(farthest_s.argmin()))


def compare(mixture: ExpertMixture, machine: GroupMachine, network: GroupNetwork, work: GroupWork) -> ExpertComparison:
    """Compare the three ways to do `work` on equal machines. Caches, activations, embedding and head count nowhere."""
    members, trains = network.members, work.kind is WorkKind.TRAINING
    machine = replace(machine, spill_bytes_per_s=0.0) if trains else machine  # optimisers change all that they hold
    gradients = ExpertPhase()

    # The group: every layer on all members. Members without a sequence of their own hold the same tokens as others.
    together = min(work.sequences, members) if trains else work.sequences
    batches = max(count for count in range(1, members + 1) if members % count == 0 and count <= together)
    resident = machine.resident(mixture, mixture.layers, members, trains=trains)
    layer = LayerOnGroup(mixture, machine, network, together * work.tokens, members // batches, resident)
    schedule = layer.choose(trains=trains)
    if trains and batches > 1:
        gradients = network.exchange(members, mixture.dense_parameters * mixture.value_bytes / members)
    turns = -(-work.sequences // together)
    group_s = mixture.layers * (turns * layer.seconds(schedule, trains=trains) + 2 * gradients.seconds)

    # Each machine alone: its share of the sequences through all layers. In training all gradients are averaged.
    resident = machine.resident(mixture, mixture.layers, 1, trains=trains)
    share = -(-work.sequences // members)
    turns, tokens = (share, work.tokens) if trains else (1, share * work.tokens)
    if trains:
        parameters = mixture.dense_parameters + mixture.experts * mixture.expert_parameters
        gradients = network.exchange(members, parameters * mixture.value_bytes / members)
    pass_s = (1 + trains * BACKWARD) * local_layer_s(mixture, machine, tokens, resident)
    alone_s = mixture.layers * (turns * pass_s + 2 * gradients.seconds)

    return ExpertComparison(network, work, schedule, group_s, _pipeline_s(mixture, machine, network, work), alone_s)


def _pipeline_s(mixture: ExpertMixture, machine: GroupMachine, network: GroupNetwork, work: GroupWork) -> float:
    """Return the seconds of `work` in a pipeline of all members, in as many pieces as is fastest."""
    trains = work.kind is WorkKind.TRAINING
    stages = min(network.members, mixture.layers)
    held = -(-mixture.layers // stages)
    resident = machine.resident(mixture, held, 1, trains=trains)
    far = min(network.machines, stages) - 1
    near = stages - 1 - far
    all_tokens = work.sequences * work.tokens
    most = all_tokens if work.kind is WorkKind.PROMPTS else work.sequences

    def seconds(pieces: int) -> float:
        tokens = all_tokens / pieces
        size_bytes = tokens * mixture.hidden * mixture.value_bytes
        stage_s = held * (1 + trains * BACKWARD) * local_layer_s(mixture, machine, tokens, resident)
        if math.isinf(stage_s):
            return math.inf
        busy_s = [each.message_s + each.sending_s(size_bytes) for each in (network.link, network.inner)]
        hops_s = [busy_s[0] + network.link.delay_s] * far + [busy_s[1] + network.inner.delay_s] * near
        beat_s = max(stage_s, (1 + trains) * busy_s[0 if far else 1])
        if work.kind is WorkKind.DECODING:  # the way back to the first stage is as long as the longest hop
            return max(stages * stage_s + sum(hops_s) + max(hops_s, default=0.0), pieces * beat_s)
        onward_s = [hop_s if trains else hop_s / 2 for hop_s in hops_s]  # a step counts each hop there and back
        return step_s([stage_s] * stages, onward_s, beat_s=beat_s, microbatches=pieces, averaging_s=0.0)

    return min(seconds(pieces) for pieces in {*PIECES, stages, work.sequences} if pieces <= most)
