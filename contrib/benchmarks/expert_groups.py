"""The model of expert groups held to a simulation of single messages: 200 random layers, links and machines. Prints JSON.

    python contrib/benchmarks/expert_groups.py [--cases 200] [--seed 0]

`swarmnode/plan/expert_groups.py` works with averages and sums. Here tokens are routed one by one, and experts are unequally
popular. Every message occupies its sender, the line out of its machine and the line into the next one. Every pass occupies its
member. Both wait in order of arrival. `chosen_over_best` is the simulated time of the best schedule relative to the chosen one's,
for experts and exchanges alone. `false_yes` counts the cases that the planner gives to a group although the simulated pipeline,
or simulated machines by themselves, are faster.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmnode.plan.expert_groups import (
    BACKWARD,
    TRAINING_BYTES,
    ExpertComparison,
    ExpertMixture,
    ExpertSchedule,
    GroupMachine,
    GroupNetwork,
    GroupWork,
    LayerOnGroup,
    LinkCost,
    WorkKind,
    compare,
)

Routes = npt.NDArray[np.bool_]
SKEW = 0.3  # deviation of the logarithm of an expert's popularity
ROUNDS = 6  # of decoding in a pipeline; the first two are not timed


@dataclass
class Timeline:
    """Tasks that occupy resources, each after those that it depends on, first come, first served."""

    seconds: list[float] = field(default_factory=list)
    delays_s: list[float] = field(default_factory=list)
    uses: list[tuple[Hashable, ...]] = field(default_factory=list)
    after: list[list[int]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)
    ends_s: list[float] = field(default_factory=list)

    def add(self, seconds: float, uses: tuple[Hashable, ...], after: Sequence[int] = (), delay_s: float = 0.0) -> int:
        """Add a task and return its number. Its followers begin `delay_s` after it has freed its resources."""
        number = len(self.seconds)
        self.seconds.append(seconds)
        self.delays_s.append(delay_s)
        self.uses.append(uses)
        self.after.append([])
        self.waits.append(len(after))
        for before in after:
            self.after[before].append(number)
        return number

    def run(self) -> float:
        """Return the time in seconds at which the last task ends; `ends_s` has each task's."""
        ready_s, free_s = [0.0] * len(self.seconds), dict[Hashable, float]()
        waits, self.ends_s = list(self.waits), [0.0] * len(self.seconds)
        heap = [(0.0, number) for number, count in enumerate(waits) if not count]
        heapq.heapify(heap)
        while heap:
            now_s, number = heapq.heappop(heap)
            begins_s = max([now_s, *(free_s.get(one, 0.0) for one in self.uses[number])])
            for one in self.uses[number]:
                free_s[one] = begins_s + self.seconds[number]
            end_s = self.ends_s[number] = begins_s + self.seconds[number] + self.delays_s[number]
            for follower in self.after[number]:
                ready_s[follower] = max(ready_s[follower], end_s)
                waits[follower] -= 1
                if not waits[follower]:
                    heapq.heappush(heap, (ready_s[follower], follower))
        return max(self.ends_s, default=0.0)


@dataclass
class Members:
    """Members of a group on a timeline of their own: passes and messages."""

    network: GroupNetwork
    line: Timeline = field(default_factory=Timeline)

    def send(self, sender: int, receiver: int, size_bytes: float, after: Sequence[int]) -> int:
        """Add a message and return its last task."""
        cards = self.network.cards
        here, there = sender // cards, receiver // cards
        if here == there:
            link, way_out, way_in = self.network.inner, ("card out", sender), ("card in", receiver)
        else:
            link, way_out, way_in = self.network.link, ("line out", here), ("line in", there)
        takes_s = link.sending_s(size_bytes)
        handed = self.line.add(link.message_s, (("sends", sender),), after)
        # the first byte arrives a delay after it was sent; then the message waits for others into the same line
        sent = self.line.add(takes_s, (way_out,), [handed], link.delay_s - takes_s)
        return self.line.add(takes_s, (way_in,), [sent])

    def swap(self, sizes: npt.NDArray[np.float64], after: Sequence[Sequence[int]], groups: int) -> list[list[int]]:
        """Let each member send `sizes[sender, receiver]` bytes to each other one of its `groups` equal groups, in rounds.

        Returns for each member the tasks after which it has everything; its own part needs only its own `after`.
        """
        members = self.network.members
        size = members // groups
        arrived = [list(each) for each in after]
        for shift in range(1, size):
            for sender in range(members):
                receiver = sender // size * size + (sender % size + shift) % size
                if sizes[sender, receiver] > 0:
                    arrived[receiver].append(self.send(sender, receiver, float(sizes[sender, receiver]), after[sender]))
        return arrived


@dataclass
class SimulatedLayer:
    """Layer of a mixture, with the experts of each token drawn; `load` [T, E] tells which experts a token needs."""

    mixture: ExpertMixture
    machine: GroupMachine
    load: Routes
    resident: float = 1.0

    def pass_s(self, load: Routes, shards: int = 1) -> float:
        """Return the seconds of a member's pass through the experts [T, held] that its tokens need."""
        size = self.mixture.expert_parameters / shards
        touched = load.any(0)
        in_memory = int(touched[: round(self.resident * load.shape[1])].sum())
        read = [
            (in_memory, self.machine.memory_bytes_per_s),
            (int(touched.sum()) - in_memory, self.machine.spill_bytes_per_s),
        ]
        read_s = sum(
            count * size * self.mixture.weight_bytes / rate if rate else math.inf for count, rate in read if count
        )
        return self.machine.pass_s / 2 + max(2 * load.sum() * size / self.machine.flops_per_s, read_s)

    def dense_s(self, tokens: float, cut: int = 1) -> float:
        """Return the seconds of a member's pass through the dense part, or through its part of `cut`."""
        parameters = self.mixture.dense_parameters / cut
        read_s = parameters * self.mixture.weight_bytes / self.machine.memory_bytes_per_s
        return self.machine.pass_s / 2 + max(2 * tokens * parameters / self.machine.flops_per_s, read_s)

    def experts_s(self, network: GroupNetwork, same: int, schedule: ExpertSchedule, backward: float = 1.0) -> float:
        """Return the simulated seconds from the router to the sum of all results; the way back has the same messages."""
        group, name, shards = Members(network), schedule.name, schedule.shards
        members = network.members
        divided = members // shards
        tokens, token_bytes = len(self.load), self.mixture.hidden * self.mixture.value_bytes
        parts = self.load.reshape(tokens, divided, -1)
        needed = parts.any(2)  # [T, divided]
        owner = np.arange(tokens) * members // tokens
        held = np.arange(members)[:, None] == owner  # [P, T]: once tokens are split
        if name in ("ep", "esp"):
            held = np.arange(members)[:, None] // same == owner // same
        done: list[list[int]] = [[] for _ in range(members)]
        for chunk in range(schedule.chunks):
            now = np.arange(tokens) % schedule.chunks == chunk
            wanted = (held & now).astype(float) @ needed * token_bytes  # [P, divided]
            sizes = np.repeat(wanted, shards, 1)  # [from, to]
            there = group.swap(sizes, [[]] * members, 1) if name != "sum" else [[]] * members
            copies = same if name in ("ep", "esp") else 1
            computed = []
            for member in range(members):
                load = np.repeat(parts[now, member // shards], copies, 0)
                seconds = backward * self.pass_s(load, shards)
                computed.append([group.line.add(seconds, (("computes", member),), there[member])])
            back = group.swap(sizes.T, computed, 1)
            own = (held & now).sum(1) * float(token_bytes)
            match name:
                case "sum":
                    back = group.swap(np.repeat(own[:, None], members, 1), back, 1)
                case "s2":
                    pieces = (held & now).astype(float) @ needed.sum(1) * token_bytes
                    back = group.swap(np.repeat(pieces[:, None], members, 1), back, members // same)
            for member in range(members):
                done[member] += back[member]
        if name == "s1":
            own = held.sum(1) * float(token_bytes)
            group.swap(np.repeat(own[:, None], members, 1), done, members // same)
        return group.line.run()

    def group_layer_s(self, network: GroupNetwork, same: int, schedule: ExpertSchedule, *, trains: bool) -> float:
        """Return the simulated seconds of the whole layer, and with `trains` of its way back."""
        tokens = len(self.load) * same / network.members
        part = np.full((network.members,) * 2, tokens / same * self.mixture.hidden * self.mixture.value_bytes)
        seconds = 0.0
        for backward in (1.0, BACKWARD)[: 1 + trains]:
            cut = Members(network)
            computed = [
                [cut.line.add(backward * self.dense_s(tokens, same), (("computes", member),))]
                for member in range(network.members)
            ]
            cut.swap(part, cut.swap(part, computed, network.members // same), network.members // same)
            seconds += min(backward * self.dense_s(tokens), cut.line.run())
            seconds += self.experts_s(network, same, schedule, backward)
        return seconds

    def local_s(self, load: Routes) -> float:
        """Return the seconds of the layer on one machine."""
        return self.dense_s(len(load)) + self.pass_s(load)


def averaging_s(network: GroupNetwork, size_bytes: float) -> float:
    """Return the simulated seconds that all members take to average `size_bytes`: a reduce-scatter and an all-gather."""
    group = Members(network)
    part = np.full((network.members,) * 2, size_bytes / network.members)
    group.swap(part, group.swap(part, [[]] * network.members, 1), 1)
    return group.line.run()


@dataclass(frozen=True)
class Case:
    """Mixture on a network, with the experts of its tokens drawn from `seed`."""

    mixture: ExpertMixture
    machine: GroupMachine
    network: GroupNetwork
    work: GroupWork
    seed: int

    def routes(self, tokens: int, seed: int = 0) -> Routes:
        """Draw the experts of `tokens` tokens, without replacement, by their popularity."""
        chance = np.random.default_rng((self.seed, seed))
        popularity = np.random.default_rng(self.seed).normal(0, SKEW, self.mixture.experts)
        score = popularity + chance.gumbel(size=(tokens, self.mixture.experts))
        load = np.zeros((tokens, self.mixture.experts), bool)
        best = np.argpartition(-score, self.mixture.active - 1, 1)[:, : self.mixture.active]
        np.put_along_axis(load, best, True, 1)
        return load

    @property
    def trains(self) -> bool:
        return self.work.kind is WorkKind.TRAINING

    @property
    def together(self) -> int:
        """Sequences of one pass of the group."""
        return min(self.work.sequences, self.network.members) if self.trains else self.work.sequences

    @property
    def same(self) -> int:
        """Members that hold the same tokens."""
        members = self.network.members
        return members // max(n for n in range(1, members + 1) if members % n == 0 and n <= self.together)

    def resident(self, layers: int, cut: int) -> float:
        """Return the share of experts in memory; negative if nothing fits."""
        mixture, width = self.mixture, TRAINING_BYTES if self.trains else self.mixture.weight_bytes
        room = self.machine.memory_bytes / width - layers * mixture.dense_parameters
        share = min(1.0, room * cut / (layers * mixture.experts * mixture.expert_parameters))
        return -1.0 if self.trains and share < 1 else share

    def group_s(self, schedule: ExpertSchedule) -> float:
        resident = self.resident(self.mixture.layers, self.network.members)
        if resident < 0:
            return math.inf
        layer = SimulatedLayer(self.mixture, self.machine, self.routes(self.together * self.work.tokens), resident)
        once_s = layer.group_layer_s(self.network, self.same, schedule, trains=self.trains)
        shared_s = 0.0
        if self.trains and self.same < self.network.members:
            shared_s = averaging_s(self.network, self.mixture.dense_parameters * self.mixture.value_bytes)
        return self.mixture.layers * (-(-self.work.sequences // self.together) * once_s + shared_s)

    def alone_s(self) -> float:
        resident = self.resident(self.mixture.layers, 1)
        if resident < 0:
            return math.inf
        share = -(-self.work.sequences // self.network.members)
        turns, tokens = (share, self.work.tokens) if self.trains else (1, share * self.work.tokens)
        load = self.routes(tokens)
        layer_s = SimulatedLayer(self.mixture, self.machine, load, resident).local_s(load)
        mixture, averaged_s = self.mixture, 0.0
        if self.trains:
            parameters = mixture.dense_parameters + mixture.experts * mixture.expert_parameters
            averaged_s = averaging_s(self.network, parameters * mixture.value_bytes)
        return mixture.layers * (turns * (1 + BACKWARD * self.trains) * layer_s + averaged_s)

    def pipeline_s(self) -> float:
        most = self.work.sequences * (self.work.tokens if self.work.kind is WorkKind.PROMPTS else 1)
        counts = {1, 2, 4, 8, 16, 32, min(self.network.members, self.mixture.layers), self.work.sequences}
        return min(self._pipeline_s(pieces) for pieces in counts if pieces <= most)

    def _pipeline_s(self, pieces: int) -> float:
        stages = min(self.network.members, self.mixture.layers)
        held = -(-self.mixture.layers // stages)
        resident = self.resident(held, 1)
        if resident < 0:
            return math.inf
        group = Members(self.network)
        all_tokens = self.work.sequences * self.work.tokens
        ends: list[list[int]] = []
        decodes = self.work.kind is WorkKind.DECODING
        for piece, part in enumerate(np.array_split(np.arange(all_tokens), pieces)):
            layer = SimulatedLayer(self.mixture, self.machine, self.routes(len(part), piece), resident)
            pass_s = held * layer.local_s(layer.load)
            size_bytes = len(part) * self.mixture.hidden * self.mixture.value_bytes
            after, rounds = list[int](), list[int]()
            for _ in range(ROUNDS if decodes else 1):
                for stage in range(stages):
                    after = [group.line.add(pass_s, (("computes", stage),), after)]
                    if stage + 1 < stages:
                        after = [group.send(stage, stage + 1, size_bytes, after)]
                if decodes:
                    after = [group.send(stages - 1, 0, size_bytes, after)]
                rounds += after
            for stage in reversed(range(stages if self.trains else 0)):
                after = [group.line.add(BACKWARD * pass_s, (("computes", stage),), after)]
                if stage:
                    after = [group.send(stage, stage - 1, size_bytes, after)]
            ends.append(rounds)
        total_s = group.line.run()
        if not decodes:
            return total_s
        return max((group.line.ends_s[rounds[-1]] - group.line.ends_s[rounds[1]]) / (ROUNDS - 2) for rounds in ends)


def draw_case(number: int, seed: int) -> Case:
    """Draw a mixture, machines, links and work that people could have."""
    chance = np.random.default_rng((seed, number))
    pick = chance.choice
    hidden, experts = int(pick([256, 1024, 2048, 4096])), int(pick([8, 16, 32, 64, 128]))
    inner = int(hidden * pick([0.375, 0.75, 1.5, 3.5]))
    active = int(pick([count for count in (1, 2, 4, 8) if count <= experts // 2]))
    mixture = ExpertMixture(int(pick([8, 24, 48])), hidden, experts, active, 3 * hidden * inner, 4 * hidden**2)
    rate = 10 ** chance.uniform(6.8, 10.1)  # 50 Mbit/s to 100 Gbit/s
    delay_s = min(0.03, 10 ** chance.uniform(-5, -3.5) * (1e10 / rate) ** 0.5)
    link = LinkCost(delay_s, float(pick([20e-6, 0.3e-3])), rate)
    cards = int(pick([1, 1, 1, 2, 4]))
    machines = int(pick([2, 4, 8])) // cards or 1
    network = GroupNetwork(max(machines, 2 if cards == 1 else 1), link, cards)
    weights = mixture.layers * (mixture.dense_parameters + experts * mixture.expert_parameters) * mixture.weight_bytes
    kind = WorkKind(pick(list(WorkKind)))
    room = weights * pick([0.3, 0.6, 1.2, 20]) if kind is not WorkKind.TRAINING else weights * pick([5, 10, 20])
    fast = bool(pick([True, False]))
    machine = GroupMachine(
        *((28e12, 650e9, room, 12e9, 36e-6) if fast and room < 1e12 else (0.5e12, 40e9, room, 2e9, 20e-6))
    )
    work = {
        WorkKind.DECODING: GroupWork(kind, int(pick([1, 4, 16, 64]))),
        WorkKind.PROMPTS: GroupWork(kind, int(pick([1, 1, 4])), int(pick([64, 256, 512]))),
        WorkKind.TRAINING: GroupWork(kind, int(pick([4, 8])), int(pick([128, 256]))),
    }[kind]
    return Case(mixture, machine, network, work, number)


def judge(case: Case) -> dict[str, Any]:
    """Simulate every schedule, the pipeline and single machines; return the chosen schedule's rank and both verdicts."""
    planned: ExpertComparison = compare(case.mixture, case.machine, case.network, case.work)
    tokens = case.together * case.work.tokens
    layer = LayerOnGroup(case.mixture, case.machine, case.network, tokens, case.same)
    roomy = replace(case.machine, memory_bytes=0.0)
    simulated = SimulatedLayer(case.mixture, roomy, case.routes(tokens))

    def seconds(schedule: ExpertSchedule) -> float:
        ways = (1.0, BACKWARD)[: 1 + case.trains]
        return sum(simulated.experts_s(case.network, case.same, schedule, way) for way in ways)

    chosen = layer.choose(trains=case.trains)
    times_s = {schedule: seconds(schedule) for schedule in layer.schedules()}
    best = min(times_s, key=lambda schedule: times_s[schedule])
    group_s, pipeline_s, alone_s = case.group_s(planned.schedule), case.pipeline_s(), case.alone_s()
    simulated_gain = 0.0 if math.isinf(group_s) else min(pipeline_s, alone_s) / group_s
    return {
        "chosen_over_best": times_s[best] / times_s[chosen],
        "chosen": str(chosen),
        "best": str(best),
        "says_yes": planned.pays,
        "gain": planned.gain,
        "simulated_gain": simulated_gain,
    }


def report(cases: int, seed: int) -> dict[str, Any]:
    """Return the figures of `cases` random cases."""
    verdicts = [judge(draw_case(number, seed)) for number in range(cases)]
    ratios = sorted(verdict["chosen_over_best"] for verdict in verdicts)
    yes = [verdict for verdict in verdicts if verdict["says_yes"]]
    missed = [verdict for verdict in verdicts if not verdict["says_yes"] and verdict["simulated_gain"] > 1]
    false = [verdict for verdict in yes if verdict["simulated_gain"] < 1]
    return {
        "cases": cases,
        "best_schedules": dict(Counter(verdict["best"].split()[0] for verdict in verdicts).most_common()),
        "chosen_over_best": {
            "mean": round(float(np.mean(ratios)), 4),
            "p10": round(ratios[cases // 10], 3),
            "least": round(ratios[0], 3),
        },
        "says_yes": len(yes),
        "false_yes": len(false),
        "false_yes_share_of_all": round(len(false) / cases, 4),
        "false_yes_share_of_yes": round(len(false) / max(1, len(yes)), 4),
        "missed_yes": len(missed),
        "most_missed_gain": round(max((verdict["simulated_gain"] for verdict in missed), default=1.0), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(json.dumps(report(arguments.cases, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
