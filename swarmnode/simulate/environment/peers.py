"""Simulated peer: its device, span and state; and the times at which peers leave and return.

Simulated devices: how long a device computes a pass.

If Helix measured the card (arXiv 2406.01566), its times of a layer count, scaled by the size of the model's layers. Otherwise a
roofline (Williams et al., 2009) counts: a pass takes as long as reading the weights or as the arithmetic, whichever is longer.
The shares of the datasheet's peaks that are reached are near the lower end of Helix's measurements (A100, V100, L4, T4): 0.4 of
the arithmetic for prompts (measured: 0.4 to 0.8) and 0.7 of the memory's bandwidth for decoding (0.66 to 0.83). A speed that
the scenario gives for a device takes precedence over both, and has the meaning of a live node's speed limit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from swarmnode.compute.capacity.capacity import unit_sizes, usable_bytes
from swarmnode.compute.capacity.expert_tiers import DISK_BYTES_PER_S, on_one_machine
from swarmnode.compute.stopwatch import Throttle
from swarmnode.config import StageConfig
from swarmnode.errors import UsageError
from swarmnode.files import parse_json, read_bounded
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.expert_groups import ExpertComparison, GroupMachine, GroupWork, compare_nearest
from swarmnode.plan.offline.gpus import LayerTimes, find_gpu, layer_times
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.span_placement import Joiner, Move, MovePolicy
from swarmnode.plan.view import PeerView, Span
from swarmnode.simulate.environment.model import WEIGHT_BYTES, GraphModel, Model
from swarmnode.swarm.records.announcement import State

FLOPS_SHARE = 0.4
BANDWIDTH_SHARE = 0.7
PASS_S = 0.0005  # least time of a unit's pass on any card: a dozen kernels to launch, and Python around them
CAPTURED_S = 36e-6  # the same when a CUDA graph is replayed: a dozen kernels, 3 us each
CALL_S = PASS_S / 12  # least time of one operator, likewise
FLOPS_PER_PARAMETER = 2  # a multiplication and an addition, for each token
FLOPS_PER_BYTE = (
    100  # arithmetic per byte of memory traffic for an unknown card: about the ratio of consumer cards in the table
)
BACKWARD = 2.0  # time relative to the forward pass: gradients of the inputs and of the weights
DEFAULT_MEMORY_BYTES = 16 * 10**9

Seconds = Callable[[float], float]
"""Function from the tokens of a pass to its seconds per layer."""


@dataclass(frozen=True)
class SimulatedDevice:
    """Speed and memory of a device for one model. Times are per layer. Units other than layers count by their parameters; with
    `by_units` every unit counts as one layer."""

    name: str
    memory_bytes: int
    decode_layer_s: Seconds
    prompt_layer_s: Seconds
    by_units: bool = False

    def __repr__(self) -> str:
        return f"<SimulatedDevice {self.name}: {self.decode_units_per_s:.0f} units/s, {self.memory_bytes / 1e9:.0f} GB>"

    @property
    def decode_units_per_s(self) -> float:
        """Units per second that the device computes for decode steps of a single session, as nodes measure and announce it."""
        return 1 / self.decode_layer_s(1)

    def layers(self, model: Model, span: Span) -> float:
        """Return the work of `span` in layers of `model`; with `by_units` its number of units."""
        return span.units if self.by_units else model.layers(span)

    def decode_s(self, layers: float, batch: int) -> float:
        """Return the seconds of a pass with one token of each of `batch` sessions through `layers` layers."""
        return layers * self.decode_layer_s(batch)

    def prompt_s(self, layers: float, tokens: int) -> float:
        """Return the seconds of a pass with `tokens` tokens of a prompt, or of a microbatch's forward pass, through `layers`
        layers."""
        return layers * self.prompt_layer_s(tokens)

    def backward_s(self, layers: float, tokens: int) -> float:
        """Return the seconds of a microbatch's backward pass with `tokens` tokens through `layers` layers."""
        return BACKWARD * self.prompt_s(layers, tokens)


def device_of(scenario: Scenario, index: int, model: Model) -> SimulatedDevice:
    """Return device `index` of `scenario` with its speed for `model`. Raises UsageError if its speed is unknown."""
    gpu = scenario.gpus[index]
    known = find_gpu(gpu)
    name = gpu or f"device {index}"
    memory_bytes = scenario.memory_bytes[index] or (known.memory_bytes if known else DEFAULT_MEMORY_BYTES)
    given = scenario.decode_units_per_s[index] if scenario.decode_units_per_s else None
    trained = scenario.training_units_per_s[index] if scenario.training_units_per_s else None
    if given is not None or trained is not None:
        return SimulatedDevice(name, memory_bytes, *_measured(given, trained), True)
    flops = scenario.peak_flops[index]
    if isinstance(model, GraphModel) and (known is not None or flops is not None):
        peaks = (known.flops, known.memory_bytes_per_s) if known else (flops or 0.0, (flops or 0.0) / FLOPS_PER_BYTE)
        return SimulatedDevice(name, memory_bytes, *_graph_roofline(model, *peaks))
    card = find_card(gpu, model.layer_parameters)
    if card is not None:
        return replace(card, name=name, memory_bytes=memory_bytes)
    if flops is None:
        raise UsageError(
            f"the speed of device {index} of {scenario.name} is not known: give it gpu, peak_tflops or "
            "decode_units_per_s in the scenario, or name a card for all such devices with --gpu"
        )
    return SimulatedDevice(name, memory_bytes, *_roofline(model.layer_parameters, flops, flops / FLOPS_PER_BYTE))


def find_card(name: str | None, layer_parameters: int, least_s: float = PASS_S) -> SimulatedDevice | None:
    """Return the card `name` with its speed for layers of `layer_parameters` parameters; None if the table of cards has no such
    card. No pass through a layer takes less than `least_s`."""
    known, measured = find_gpu(name), layer_times(name, layer_parameters)
    if known is None:
        return None
    speeds = (
        _roofline(layer_parameters, known.flops, known.memory_bytes_per_s, least_s)
        if measured is None
        else _scaled(measured, layer_parameters, least_s)
    )
    return SimulatedDevice(known.name, known.memory_bytes, *speeds)


def _measured(decode_units_per_s: float | None, training_units_per_s: float | None) -> tuple[Seconds, Seconds]:
    """Return the times (decoding, prompt) of a node with at least one speed given. A prompt takes as long as the forward part of
    training, or without a training speed as on a node that is throttled to `decode_units_per_s`."""
    if training_units_per_s is None:
        throttle = Throttle(decode_units_per_s or 0.0)
        return lambda _: throttle.least_s(1, 1), lambda tokens: throttle.least_s(1, int(tokens))
    token_s = 1 / ((1 + BACKWARD) * training_units_per_s)
    step_s = 1 / decode_units_per_s if decode_units_per_s else token_s
    return lambda _: step_s, lambda tokens: tokens * token_s


def _scaled(measured: LayerTimes, layer_parameters: int, least_s: float) -> tuple[Seconds, Seconds]:
    ratio = layer_parameters / measured.parameters
    return (
        lambda batch: max(least_s, ratio * measured.decode_s(batch)),
        lambda tokens: max(least_s, ratio * measured.prompt_s(tokens)),
    )


def _roofline(
    layer_parameters: int, flops: float, bytes_per_s: float, least_s: float = PASS_S
) -> tuple[Seconds, Seconds]:
    arithmetic_s = FLOPS_PER_PARAMETER * layer_parameters / (flops * FLOPS_SHARE)
    reading_s = WEIGHT_BYTES * layer_parameters / (bytes_per_s * BANDWIDTH_SHARE)

    def pass_s(tokens: float) -> float:
        return max(least_s, reading_s, arithmetic_s * tokens)

    return pass_s, pass_s


def _graph_roofline(model: GraphModel, flops: float, bytes_per_s: float) -> tuple[Seconds, Seconds]:
    """Return the times (decoding, prompt) of a graph's middle unit: arithmetic, memory traffic of the other operators, and
    calls."""
    step_s = model.flops / (flops * FLOPS_SHARE) + model.moved_bytes / (bytes_per_s * BANDWIDTH_SHARE)
    step_s += model.calls * CALL_S
    sample_s = step_s / ((1 + BACKWARD) * sum(model.unit_layers) * model.samples)
    return lambda samples: samples * sample_s, lambda samples: samples * sample_s


HOST_BYTES_PER_S = 12e9  # of experts that a card reads from the host's memory, on PCIe 4.0 x16
MANY_TOKENS = 4096  # in a pass that arithmetic alone limits


def compare_expert_groups(
    scenario: Scenario, model: Model, works: Sequence[GroupWork], value_bytes: float = WEIGHT_BYTES
) -> list[ExpertComparison]:
    """Compare expert groups on the scenario's nearest machines with pipelines and single machines, for each of `works`.

    Empty if the model has no experts or the scenario has one device. Raises UsageError if a device's speed is unknown.
    """
    mixture = model.mixture()
    if mixture is None or scenario.devices < 2:
        return []
    machines = []
    for index in range(scenario.devices):
        device, known = device_of(scenario, index, model), find_gpu(scenario.gpus[index])
        given = scenario.decode_units_per_s[index] if scenario.decode_units_per_s else None
        flops = FLOPS_PER_PARAMETER * model.layer_parameters * MANY_TOKENS / device.prompt_layer_s(MANY_TOKENS)
        memory = usable_bytes(device.memory_bytes)
        reads = read_rate(device, model)
        if known and given is None:  # without the least time of a pass, which a group has in each member
            reads = known.memory_bytes_per_s * BANDWIDTH_SHARE
        spill, pass_s = (HOST_BYTES_PER_S, PASS_S) if known else (DISK_BYTES_PER_S, 0.0)
        machines.append(GroupMachine(flops, reads, memory, spill, pass_s))
    mixture = replace(mixture, value_bytes=value_bytes)
    return [compare_nearest(mixture, machines, scenario.delay_s, scenario.bandwidth_bps, work) for work in works]


def read_rate(device: SimulatedDevice, model: Model) -> float:
    """Return the bytes of memory per second that the device reads in a decode step."""
    return WEIGHT_BYTES * model.layer_parameters / device.decode_layer_s(1)


def experts_on_disks(scenario: Scenario, model: Model) -> list[dict[str, object]]:
    """Return what each machine without a card does that serves a packed mixture alone with experts on its disk, as `fit` says it,
    with its number as `device`. Machines that hold the model whole, or not even so, are left out."""
    if model.packed is None or not model.experts:
        return []
    import torch

    sizes, found = unit_sizes(model.packed, dtype=torch.float32, keeps_packed=True), []
    for index in range(scenario.devices):
        if scenario.gpus[index] is None and (limit_bytes := scenario.memory_bytes[index]) is not None:
            rate = read_rate(device_of(scenario, index, model), model)
            facts = on_one_machine(model.packed, sizes, limit_bytes, StageConfig().cache_tokens, rate)
            found += [{"device": index, **facts}] if facts else []
    return found


NOTHING = Span(0, 0)
MAX_FILE_BYTES = 64 << 20
AWAY_S = 300.0  # mean time until another peer takes a leaver's place


@dataclass(frozen=True, order=True)
class Change:
    """Moment at which a device vanishes without a goodbye (`up` is False) or returns (`up` is True)."""

    at_s: float
    device: int
    up: bool


def steady_churn(devices: int, rate_per_hour: float, seconds: float, chance: random.Random) -> list[Change]:
    """Return random changes of `devices` devices within `seconds`, in order of time: each vanishes `rate_per_hour` times an
    hour on average (Poisson) and returns after `AWAY_S` seconds on average. The list is empty if the rate is 0."""
    changes: list[Change] = []
    for device in range(devices):
        now_s = 0.0
        while rate_per_hour > 0:
            now_s += chance.expovariate(rate_per_hour / 3600)
            if now_s >= seconds:
                break
            back_s = now_s + chance.expovariate(1 / AWAY_S)
            changes += [Change(now_s, device, False), Change(back_s, device, True)]
            now_s = back_s
    return sorted(change for change in changes if change.at_s < seconds)


def read_trace(path: str | Path, devices: int) -> list[Change]:
    """Read changes of `devices` devices from a JSON file with a list of [seconds, device, "up" or "down"], and sort them by time.
    Raises UsageError if the file cannot be read or holds anything else."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
        if content is None:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        rows = parse_json(content)
        if not isinstance(rows, list):
            raise ValueError("it is not a list")
        changes = [_change(row, devices) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}: not a trace, which is a JSON list of [seconds, device, up|down]: {error}") from None
    return sorted(changes)


def _change(row: list[object], devices: int) -> Change:
    at_s, device, what = row
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not 0 <= at_s < 1e9:
        raise ValueError(f"{at_s!r} is not a time in seconds")
    if type(device) is not int or not 0 <= device < devices:
        raise ValueError(f"{device!r} is not one of {devices} devices")
    if what not in ("up", "down"):
        raise ValueError(f"{what!r} is neither up nor down")
    return Change(float(at_s), device, what == "up")


@dataclass(eq=False)
class Peer:
    """Simulated peer. `index` is its number in `Links`. A peer that is not `alive` is away; it returns as a new peer with a new
    id."""

    index: int
    peer: PeerId
    device: SimulatedDevice
    capacity_units: int
    up_bps: float = 0.0
    down_bps: float = 0.0
    started_at: float = 0.0
    span: Span = NOTHING
    state: State = State.OFFLINE
    sessions: int = 0
    cache_free_bytes: float = 0.0
    life: int = 0  # grows when it joins, moves or vanishes: actions planned in an earlier life are void
    load_is_news: bool = field(default=False, repr=False)  # an announcement of its load is planned
    wish: Move | None = field(default=None, repr=False)  # the move that it waits to make
    move_s: float = field(default=MovePolicy().move_s, repr=False)  # duration of its last move
    busy_s: float = field(default=0.0, repr=False)

    def __repr__(self) -> str:
        return f"<Peer {self.peer} {self.state.name} {self.span} {self.device!r}>"

    @property
    def alive(self) -> bool:
        """Whether the peer is in the swarm, in any state but OFFLINE."""
        return self.state is not State.OFFLINE

    @property
    def serves(self) -> bool:
        """Whether the peer computes for others. A draining peer still computes for its sessions."""
        return self.state in (State.READY, State.DRAINING)

    def computes(self, takes_s: float) -> None:
        """Add `takes_s` seconds to the time that the device was busy."""
        self.busy_s += takes_s

    def view(self) -> PeerView:
        """Return the simulated peer as planners see it."""
        return PeerView(
            self.peer,
            self.span,
            self.state,
            self.device.decode_units_per_s,
            self.sessions,
            self.started_at,
            self.up_bps,
            self.down_bps,
        )

    def joiner(self) -> Joiner:
        """Return the peer's capacity and speed, as the rule for choosing layers takes them."""
        return Joiner(self.peer, self.capacity_units, self.device.decode_units_per_s, self.started_at)
