"""Hosting: the plan of a training on a network: its stages and pipelines, the devices of each stage, and the layers of each stage.

Devices differ in speed and memory, and any number of them will do. For each candidate number of stages and pipelines the planner
searches a grid (`grid_search.py`) and cuts the layers so that stages take equally long (`split`). Devices outside the grid
reinforce stages. The planner estimates the time of a step and searches longer with the best numbers. The best plan has the
shortest step; missing holders of layers count as a longer step, as among live peers (`plan/cost.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import pairwise

import numpy as np

from swarmnode.errors import LocalError, UsageError
from swarmnode.plan.cost import HOLDERS, fragility, step_s, transfer_s
from swarmnode.plan.offline.grid import Grid, Members, MicrobatchTraffic, Problem, dendrogram, slower_way_s
from swarmnode.plan.offline.grid_search import Search
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import Span

QUICK = 0.002  # effort of the searches that compare numbers of stages and pipelines: layouts alone
Progress = Callable[[float, float], None]


@dataclass(frozen=True)
class StageRoom:
    """Joint work per second of the devices of one stage, and the bytes that fit into the smallest of them."""

    work_per_s: float
    room_bytes: float


def split(
    work: Sequence[float],
    unit_bytes: Sequence[int],
    stages: Sequence[StageRoom],
    entering_s: Callable[[int], Floats | float] = lambda _: 0.0,
) -> list[Span] | None:
    """Cut the layers into one span per stage, in order, such that the slowest stage or hop is as fast as possible.

    `work` and `unit_bytes` are per layer. `entering_s(number)` returns the seconds of the hop into that stage, one for each layer
    that the stage may begin with, or one for all. Returns None if no cut fits into the stages' memory. A dynamic programme over
    stages and layers keeps the time of the slowest stage, for each number of layers that the first stages may hold together.
    """
    work_before = np.concatenate([[0.0], np.cumsum(work)])
    bytes_before = np.concatenate([[0.0], np.cumsum(unit_bytes)])
    units = len(work)
    slowest_s = np.full(units + 1, np.inf)
    slowest_s[0] = 0.0
    starts = np.zeros((len(stages), units + 1), dtype=np.intp)
    for number, stage in enumerate(stages):
        before_s = np.maximum(slowest_s, np.append(entering_s(number) + np.zeros(units), 0.0))
        # seconds [U + 1, U + 1] of each span [start, end); infinite if it is empty or does not fit
        seconds: Floats = (work_before - work_before[:, None]) / stage.work_per_s
        held_bytes = bytes_before - bytes_before[:, None]
        seconds[held_bytes > stage.room_bytes] = np.inf
        seconds[np.tril_indices(len(seconds))] = np.inf
        reached_s = np.maximum(before_s[:, None], seconds)
        starts[number] = reached_s.argmin(axis=0)
        slowest_s = reached_s.min(axis=0)
    if not np.isfinite(slowest_s[units]):
        return None
    spans, end = [], units
    for number in reversed(range(len(stages))):
        start = int(starts[number, end])
        spans.append(Span(start, end))
        end = start
    return spans[::-1]


def units_that_fit(unit_bytes: Sequence[int], rooms_bytes: Sequence[float]) -> int:
    """Return the number of layers, from the first on, that fit into stages of `rooms_bytes`, filled one after another."""
    held = 0
    for room_bytes in rooms_bytes:
        left_bytes = room_bytes
        while held < len(unit_bytes) and unit_bytes[held] <= left_bytes:
            left_bytes -= unit_bytes[held]
            held += 1
    return held


@dataclass(frozen=True)
class Workload:
    """Model in training. Per layer: bytes in memory, bytes of gradients, work (in any measure), and the bytes of one microbatch
    that enter it from the layer before."""

    unit_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    work: tuple[float, ...]
    boundary_bytes: tuple[int, ...]
    microbatches: int  # of one step, over all pipelines

    @property
    def units(self) -> int:
        """Number of layers in the model, the embedding and the head included."""
        return len(self.work)

    @property
    def activation_bytes(self) -> int:
        """Bytes of one microbatch between two stages, taken as the median over all cuts; 0 if the model has one layer."""
        inner = sorted(self.boundary_bytes[1:])
        return inner[len(inner) // 2] if inner else 0


@dataclass(frozen=True)
class DeviceRates:
    """Rates of each device: work per second (forward and backward, in the workload's measure), and bytes free for layers."""

    work_per_s: tuple[float, ...]
    room_bytes: tuple[int, ...]


@dataclass(frozen=True)
class PlannedStage:
    """Stage of a plan: the devices that hold the same layers, with estimated seconds."""

    span: Span
    devices: tuple[int, ...]
    compute_s: float  # of one microbatch on one of its devices, on average
    averaging_s: float


@dataclass(frozen=True, eq=False)
class Hosting:
    """A plan: the grid of full pipelines, the stages with all their devices, and the time of a step."""

    problem: Problem
    grid: Grid
    stages: tuple[PlannedStage, ...]
    step_s: float

    def problem_after(self, network: Scenario, workload: Workload, stage: int) -> Problem:
        """Return the problem with hops that carry the output of stage number `stage`; of the last, the first layer's input."""
        size_bytes = workload.boundary_bytes[self.stages[stage].span.end % workload.units]
        return replace(self.problem, hop_s=slower_way_s(network, np.arange(network.devices), size_bytes))

    @property
    def used(self) -> frozenset[int]:
        """Devices that hold layers."""
        return frozenset(device for stage in self.stages for device in stage.devices)

    def units_below(self, holders: int) -> int:
        """Return the number of layers that fewer than `holders` devices hold."""
        return sum(stage.span.units for stage in self.stages if len(stage.devices) < holders)

    def missing_holders(self, holders: int) -> float:
        """Return the missing share of the additional copies of layers, if each layer should have `holders` holders."""
        missing = sum(max(0, holders - len(stage.devices)) * stage.span.units for stage in self.stages)
        return missing / max(1, holders - 1) / self.stages[-1].span.end

    def counted_s(self, holders: int) -> float:
        """Return the measure for comparing plans: the seconds of a step, raised by missing holders of layers."""
        return fragility(self.missing_holders(holders)) * self.step_s


@dataclass(eq=False)
class Planner:
    """Planner of one workload on one network. The search ends once `expired()` is true."""

    network: Scenario
    hardware: DeviceRates
    workload: Workload
    _: KW_ONLY
    seed: int = 0
    expired: Callable[[], bool] = lambda: False

    def __post_init__(self) -> None:
        self._paths = replace(self.network, delay_s=np.zeros_like(self.network.delay_s))  # what they carry in a second
        self._line_bps = np.where(np.eye(self.network.devices, dtype=bool), 0.0, self.network.bandwidth_bps).max(axis=1)
        self._work_per_s = np.array(self.hardware.work_per_s)
        self._room_bytes = np.array(self.hardware.room_bytes, dtype=float)

    def __repr__(self) -> str:
        return f"Planner({self.workload.units} units on {self.network!r})"

    def plan(
        self,
        *,
        stages: int | None = None,
        replicas: int | None = None,
        holders: int = HOLDERS,
        effort: float = 1.0,
        progress: Progress = lambda done, step_s: None,
    ) -> Hosting:
        """Return the best plan found.

        `stages` and `replicas` fix the number of stages and of pipelines; None compares several. `holders` is the number of
        holders that each layer should have; with 1 only the time of a step counts. `effort` scales the final search.
        `progress` gets a share done and the best seconds of a step. Raises UsageError if the grid is larger than the network
        or the model, LocalError if the model does not fit.
        """
        shapes = list(self._shapes(stages, replicas, holders))
        best: Hosting | None = None
        for number, shape in enumerate(shapes):
            best = _better(best, self._host(*shape, holders, effort=QUICK), holders)
            progress(number / len(shapes) / 2, best.step_s if best else np.inf)
            if best and self.expired():
                break
        if best is None:
            raise LocalError(self._shortage(shapes))
        longer = self._host(len(best.grid), len(best.grid[0]), holders, effort=effort)
        return _better(best, longer, holders) or best

    def _shapes(self, stages: int | None, replicas: int | None, holders: int) -> Iterator[tuple[int, int]]:
        """Yield the numbers of stages and pipelines to compare. Raises UsageError if `stages` or `replicas` is too large.

        Stages are all numbers up to a dozen, then ever fewer. Pipelines are the largest possible number and its halves, the
        usual number of holders, and `holders`.
        """
        devices = self.network.devices
        most = min(devices, self.workload.units)
        if stages is not None and stages > most:
            raise UsageError(
                f"--stages {stages}: use at most {most}: {self.workload.units} layers on {devices} devices"
            )
        if replicas is not None and replicas * (stages or 1) > devices:
            raise UsageError(
                f"--replicas {replicas}: use at most {devices // (stages or 1)}: {devices} devices in {stages or 1} stages or more"
            )
        counts = [stages] if stages else sorted({min(most, max(power + 1, round(1.25**power))) for power in range(40)})
        for count in counts:
            halves = {max(1, devices // count >> power) for power in range(devices.bit_length())}
            pipelines = [replicas] if replicas else sorted({*halves, HOLDERS, holders})
            yield from ((count, number) for number in pipelines if count * number <= devices)

    def _host(self, stages: int, replicas: int, holders: int, *, effort: float) -> Hosting | None:
        """Return a plan with this number of stages and pipelines; None if the layers do not fit."""
        gradient_bytes = sum(self.workload.gradient_bytes) / stages
        traffic = MicrobatchTraffic(self.workload.activation_bytes, gradient_bytes)
        problem = Problem.on(self.network, stages=stages, replicas=replicas, traffic=traffic)
        # the devices with most memory, sorted by it, so that stages offer as much as possible
        near = sorted(dendrogram(problem.hop_s).order, key=lambda device: -self._room_bytes[device])
        roomiest = np.array(near[: stages * replicas]).reshape(stages, replicas)
        if self._staged(problem, roomiest) is None:
            return None
        hosting = self._staged(problem, self._search(problem, effort).run())
        if hosting is None:  # devices with little memory spoil stages: keep like with like
            alike = replace(problem, kinds=self._room_bytes)
            hosting = self._staged(problem, self._search(alike, effort).run(roomiest))
        return self._reinforced(hosting, holders) if hosting else None

    def _search(self, problem: Problem, effort: float) -> Search:
        return Search(problem, seed=self.seed, effort=effort, expired=self.expired)

    def _staged(self, problem: Problem, grid: Grid) -> Hosting | None:
        """Return the plan with the layers cut over a grid, in its better direction; None if they fit in neither."""
        walks = (self._cut(problem, walk, [tuple(group.tolist()) for group in walk]) for walk in (grid, grid[::-1]))
        fitting = [hosting for hosting in walks if hosting]
        return min(fitting, key=lambda hosting: hosting.step_s, default=None)

    def _reinforced(self, hosting: Hosting, holders: int) -> Hosting:
        """Let each device outside the grid, the fastest first, join a stage if that improves the plan.

        Returns `hosting` itself if these devices are enough for one more pipeline.
        """
        left = sorted(set(range(self.network.devices)) - hosting.used, key=lambda device: -self._work_per_s[device])
        if len(left) >= len(hosting.stages):
            return hosting
        for device in left:
            groups = [stage.devices for stage in hosting.stages]
            joined = (
                self._cut(hosting.problem, hosting.grid, [*groups[:at], (*groups[at], device), *groups[at + 1 :]])
                for at in range(len(groups))
            )
            hosting = min((hosting, *filter(None, joined)), key=lambda one: one.counted_s(holders))
        return hosting

    def _cut(self, problem: Problem, grid: Grid, groups: Sequence[tuple[int, ...]]) -> Hosting | None:
        """Return the plan with the layers cut over groups of devices and its estimated step; None if they do not fit."""
        rooms = [
            StageRoom(self._work_per_s[list(group)].sum(), self._room_bytes[list(group)].min()) for group in groups
        ]
        even = len(set(self.workload.boundary_bytes[1:])) <= 1  # every cut between two layers sends the same
        entering = {} if even else {"entering_s": self._entering_s(grid)}
        spans = split(self.workload.work, self.workload.unit_bytes, rooms, **entering)
        if spans is None:
            return None
        stages = tuple(
            PlannedStage(
                span,
                group,
                compute_s=len(group) * sum(self.workload.work[span.start : span.end]) / room.work_per_s,
                averaging_s=self._averaging_s(group, span),
            )
            for span, group, room in zip(spans, groups, rooms, strict=True)
        )
        return Hosting(problem, grid, stages, self._step_s(problem, grid, stages))

    def _entering_s(self, grid: Grid) -> Callable[[int], Floats | float]:
        """Return a function of a stage's number: the seconds of the hop into it, for each layer that it may begin with."""
        sizes = self.workload.boundary_bytes

        def seconds(stage: int) -> Floats | float:
            if stage == 0:
                return 0.0
            by_size = {size: hop_s(self._paths, grid[stage - 1], grid[stage], size) for size in set(sizes)}
            return np.array([by_size[size] for size in sizes])

        return seconds

    def _averaging_s(self, group: tuple[int, ...], span: Span) -> float:
        """Return the seconds that `group` takes to average the gradients of the layers in `span`, by DT-FM's model."""
        gradient_bytes = sum(self.workload.gradient_bytes[span.start : span.end])
        mates_s = 2 * slower_way_s(self.network, np.array(group), gradient_bytes / len(group))
        return float(mates_s.sum(axis=1).max())

    def _step_s(self, problem: Problem, grid: Grid, stages: Sequence[PlannedStage]) -> float:
        """Estimate the seconds of a step. The devices of a stage share the microbatches.

        A link's delay counts once, not for each microbatch: messages follow one another on the way.
        """
        sizes = [self.workload.boundary_bytes[stage.span.start] for stage in stages[1:]]
        hops = [(*rows, size) for rows, size in zip(pairwise(grid), sizes, strict=True)]
        turns_s = [stage.compute_s * problem.replicas / len(stage.devices) for stage in stages]
        paths_s = [hop_s(self._paths, *hop) for hop in hops]
        crossing_bytes = (before + behind for before, behind in zip([0, *sizes], [*sizes, 0], strict=True))
        lines_s = [
            self._line_s(stage.devices, problem.replicas, size)
            for stage, size in zip(stages, crossing_bytes, strict=True)
        ]
        return step_s(
            [stage.compute_s for stage in stages],
            [hop_s(self.network, *hop) for hop in hops],
            beat_s=max([*turns_s, *paths_s, *lines_s]),
            microbatches=self.workload.microbatches / problem.replicas,
            averaging_s=max(stage.averaging_s for stage in stages),
        )

    def _line_s(self, group: tuple[int, ...], microbatches: int, size_bytes: float) -> float:
        """Return the seconds that the busiest device of `group` spends sending its share of `microbatches`, divided by speed.

        `size_bytes` are sent for each microbatch: activations onward and gradients back.
        """
        members = list(group)
        shares = self._work_per_s[members] / self._work_per_s[members].sum()
        sent_s = transfer_s(size_bytes, np.zeros(len(members)), self._line_bps[members])
        return float((microbatches * shares * sent_s).max())

    def _shortage(self, shapes: Sequence[tuple[int, int]]) -> str:
        """Return the text of the error that the model does not fit: the memory missing on the shape that offers most."""
        offers = [self._offer(*shape) for shape in shapes]
        rooms = max(offers, key=sum)
        unit_bytes = self.workload.unit_bytes
        stages, replicas = shapes[offers.index(rooms)]
        at_most = f"{stages} stages of {replicas} devices offer it {_gb(sum(rooms))} (the smallest of a stage counts)"
        if max(unit_bytes) > max(rooms):
            what, missing = f"layer {unit_bytes.index(max(unit_bytes))} alone", max(unit_bytes) - max(rooms)
            return f"{what} needs {_gb(max(unit_bytes))} in training; {at_most}: {_gb(missing)} are missing in each"
        held = units_that_fit(unit_bytes, rooms)
        missing = max(sum(unit_bytes) - sum(rooms), sum(unit_bytes[held:]))
        return (
            f"the model needs {_gb(sum(unit_bytes))} in training; {at_most}: {held} of its {self.workload.units} layers fit, "
            f"{_gb(missing)} are missing"
        )

    def _offer(self, stages: int, replicas: int) -> list[float]:
        """Return the memory in bytes of the smallest device in each of `stages` groups; the roomiest devices are put into groups
        of `replicas`, in order of their memory."""
        roomiest = np.sort(self._room_bytes)[::-1][: stages * replicas]
        rooms: list[float] = roomiest.reshape(stages, replicas).min(axis=1).tolist()
        return rooms


def _better(first: Hosting | None, other: Hosting | None, holders: int) -> Hosting | None:
    return min(filter(None, (first, other)), key=lambda hosting: hosting.counted_s(holders), default=None)


def hop_s(network: Scenario, here: Members, there: Members, size_bytes: float) -> float:
    """Return the seconds of one hop, one way: the slowest link, in its slower direction, from a stage to the next.

    `here` and `there` are the devices of the two stages, one of each pipeline; each sends `size_bytes`.
    """
    ways = ((here, there), (there, here))
    sent_s = (transfer_s(size_bytes, network.delay_s[way], network.bandwidth_bps[way]) for way in ways)
    return max(float(seconds.max()) for seconds in sent_s)


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:,.1f} MB"
