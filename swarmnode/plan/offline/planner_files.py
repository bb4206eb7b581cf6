"""Network to plan or simulate on: devices, and the delay and bandwidth between each two of them.

The file is one JSON object: `devices` (count), `delay_ms` (one way) and `bandwidth_gbps` (Gbit/s), both device x device and
read as [from][to]. The diagonal is read but means nothing. Optional fields are `name` and, per device, `region`, `gpu`,
`peak_tflops`, `memory_gb`, `decode_units_per_s` and `training_units_per_s`, each null for a device with an unknown value. The file
that `swarmnode status --export` writes of a live swarm also has `swarm` and `peer`.

Plan in a file, as `swarmnode plan --model … --json` prints it: the layers of each device, and the pipelines.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from swarmnode.errors import UsageError
from swarmnode.files import read_bounded
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import Span

MAX_PLAN_BYTES = 16 << 20
NOTHING = Span(0, 0)


@dataclass(frozen=True)
class PlanFile:
    """Plan read from a file: the number of layers, the stages and the pipelines, with devices by their number in the network.

    `stages` are pairs of layers and the devices that hold them; `pipelines` list devices, stage after stage. If the network was
    a live swarm, `swarm` is its id in hex and `peers` are the ids of its devices; both are empty otherwise.
    """

    units: int
    stages: tuple[tuple[Span, tuple[int, ...]], ...]
    pipelines: tuple[tuple[int, ...], ...]
    peers: tuple[str, ...] = ()
    swarm: str = ""

    @classmethod
    def load(cls, path: str | Path) -> PlanFile:
        """Read the plan in the file at `path`. Raises UsageError, naming the file, if it cannot be read or is not a plan."""
        try:
            content = read_bounded(path, MAX_PLAN_BYTES)
            if content is None:
                raise UsageError(f"{path}: larger than {MAX_PLAN_BYTES >> 20} MiB, so it is not a plan")
            return _parse_plan(json.loads(content))
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            fault = f"it has no {error}" if isinstance(error, KeyError) else error
            raise UsageError(f"{path}: not a plan as `swarmnode plan --model … --json` prints it: {fault}") from None

    def spans(self, devices: int, units: int) -> list[Span]:
        """Return the span of layers of each of `devices` devices; an empty span for an unused device.

        Raises UsageError if the plan is not for `units` layers or names a device that the network does not have.
        """
        if self.units != units:
            raise UsageError(f"the plan is for {self.units} layers, and the model has {units}; plan for this model")
        named = [device for _, members in self.stages for device in members]
        most = max(named + [device for pipeline in self.pipelines for device in pipeline], default=0)
        if most >= devices:
            raise UsageError(
                f"the plan names device {most}, but the network has {devices}, numbered from 0; plan on this network"
            )
        held = {device: span for span, members in self.stages for device in members}
        return [held.get(device, NOTHING) for device in range(devices)]

    def check_swarm(self, swarm: str) -> None:
        """Check that the plan is for the swarm with this id in hex.

        Raises UsageError if it is for another network, or if it names a device without a peer.
        """
        if self.swarm != swarm:
            raise UsageError(
                "the plan is not for this swarm; plan on the file that `swarmnode status --export` writes for this swarm"
            )
        self.spans(len(self.peers), self.units)

    def span_of(self, peer: str, units: int) -> Span:
        """Return the layers that the plan gives to `peer`; an empty span if the plan does not use this peer.

        Raises UsageError if the plan is not for a model of `units` layers, or names a device without a peer.
        """
        held = dict(zip(self.peers, self.spans(len(self.peers), units), strict=True))
        return held.get(peer, NOTHING)


def _parse_plan(values: dict[str, Any]) -> PlanFile:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    stages = tuple(_stages(values["stages"]))
    pipelines = tuple(tuple(map(_whole_number, pipeline)) for pipeline in values["pipelines"])
    peers = tuple(map(str, values.get("peers", ())))
    ends = [0, *(span.end for span, _ in stages)]
    if not stages or [span.start for span, _ in stages] != ends[:-1]:
        raise ValueError("its stages do not follow one another from layer 0 on")
    twice = [device for device, count in Counter(each for _, held in stages for each in held).items() if count > 1]
    if twice:
        raise ValueError(f"device {twice[0]} is in two places of its stages")
    if len(set(peers)) < len(peers):
        raise ValueError("a peer is named twice")
    return PlanFile(ends[-1], stages, pipelines, peers, str(values.get("swarm", "")))


def _stages(rows: list[dict[str, Any]]) -> Iterator[tuple[Span, tuple[int, ...]]]:
    for row in rows:
        span = Span(*map(_whole_number, row["units"]))
        if span.start >= span.end:
            raise ValueError(f"layers {list(span)} are an empty range")
        yield span, tuple(map(_whole_number, row["devices"]))


def _whole_number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not the number of a layer or device")
    return value


T = TypeVar("T")

MAX_DEVICES = 2_048
MAX_FILE_BYTES = 256 << 20  # two matrices of that many devices, generously written
MAX_DELAY_MS = 1e7
MIN_BANDWIDTH_GBPS, MAX_BANDWIDTH_GBPS = 1e-9, 1e6
MAX_PEAK_TFLOPS = 1e6
MAX_MEMORY_GB = 1e6
MAX_UNITS_PER_S = 1e9
MAX_TEXT_CHARS = 100


@dataclass(frozen=True, eq=False)
class Scenario:
    """Network of D devices with the delay and bandwidth of each link. Matrices are [from, to] and read-only."""

    name: str
    regions: tuple[str | None, ...]
    delay_s: Floats  # [D, D], one way
    bandwidth_bps: Floats  # [D, D]
    gpus: tuple[str | None, ...]
    peak_flops: tuple[float | None, ...]  # per second
    memory_bytes: tuple[int | None, ...]
    decode_units_per_s: tuple[float | None, ...] = ()  # as measured on a node
    training_units_per_s: tuple[float | None, ...] = ()  # as measured: positions through a layer, forward and backward
    peers: tuple[str | None, ...] = ()  # ids of the peers, if the network is a live swarm
    swarm: str = ""  # id of the live swarm in hex, or empty

    @property
    def devices(self) -> int:
        """Number of devices."""
        return len(self.regions)

    def __repr__(self) -> str:
        return f"Scenario({self.name!r}, {self.devices} devices in {len(set(self.regions))} regions)"

    def label(self, device: int) -> str:
        """Return the device's number, followed by its region if it has one."""
        region = self.regions[device]
        return f"{device} {region}" if region else str(device)

    @classmethod
    def load(cls, path: str | Path) -> Scenario:
        """Read the network in the file at `path`. Raises UsageError, naming the file and the field, if it is not valid."""
        path = Path(path)
        try:
            return _parse(_read_object(path), default_name=path.stem)
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
        if content is None:
            raise UsageError(f"larger than {MAX_FILE_BYTES >> 20} MiB, so it is no scenario; give another file")
        values = json.loads(content)
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
        raise UsageError("not JSON; a scenario is a JSON object with devices, delay_ms and bandwidth_gbps") from None
    if not isinstance(values, dict):
        raise UsageError("not a JSON object; a scenario has devices, delay_ms and bandwidth_gbps")
    return values


def _parse(values: dict[str, Any], *, default_name: str) -> Scenario:
    for field in ("devices", "delay_ms", "bandwidth_gbps"):
        if field not in values:
            raise UsageError(f"{field} is missing; a network has devices, delay_ms and bandwidth_gbps")
    devices = values["devices"]
    if type(devices) is not int or not 1 <= devices <= MAX_DEVICES:
        raise UsageError(f"devices is {_shown(devices)}; it must be a count from 1 to {MAX_DEVICES}")
    delay_ms = _matrix(values, "delay_ms", devices, 0.0, MAX_DELAY_MS)
    bandwidth_gbps = _matrix(values, "bandwidth_gbps", devices, MIN_BANDWIDTH_GBPS, MAX_BANDWIDTH_GBPS)
    peak_tflops = _per_device(values, "peak_tflops", devices, _positive(MAX_PEAK_TFLOPS))
    memory_gb = _per_device(values, "memory_gb", devices, _positive(MAX_MEMORY_GB))
    peers = _per_device(values, "peer", devices, _text)
    first: dict[str, int] = {}
    for number, peer in enumerate(peers):
        if peer is not None and first.setdefault(peer, number) < number:
            raise UsageError(f"peer[{number}] is the same as peer[{first[peer]}]; each peer is one device")
    return Scenario(
        name=default_name if values.get("name") is None else _text(values["name"], "name"),
        regions=_per_device(values, "region", devices, _text),
        delay_s=_frozen(delay_ms / 1e3),
        bandwidth_bps=_frozen(bandwidth_gbps * 1e9),
        gpus=_per_device(values, "gpu", devices, _text),
        peak_flops=tuple(None if value is None else value * 1e12 for value in peak_tflops),
        memory_bytes=tuple(None if value is None else int(value * 1e9) for value in memory_gb),
        decode_units_per_s=_per_device(values, "decode_units_per_s", devices, _positive(MAX_UNITS_PER_S)),
        training_units_per_s=_per_device(values, "training_units_per_s", devices, _positive(MAX_UNITS_PER_S)),
        peers=peers,
        swarm="" if values.get("swarm") is None else _text(values["swarm"], "swarm"),
    )


def _matrix(values: dict[str, Any], field: str, devices: int, least: float, most: float) -> Floats:
    """Return a field as a [D, D] matrix. Raises UsageError unless it has numbers of [least, most], or [0, most] on the diagonal."""
    rows = values[field]
    _check_length(rows, field, devices)
    matrix = np.empty((devices, devices))
    for i, row in enumerate(rows):
        _check_length(row, f"{field}[{i}]", devices)
        for j, value in enumerate(row):
            matrix[i, j] = _number(value, f"{field}[{i}][{j}]", 0.0 if i == j else least, most)
    return matrix


def _per_device(
    values: dict[str, Any], field: str, devices: int, read: Callable[[Any, str], T]
) -> tuple[T | None, ...]:
    """Return a field's values, one per device, each None if it is null. A missing field gives None for all devices."""
    items = values.get(field)
    if items is None:
        return (None,) * devices
    _check_length(items, field, devices)
    return tuple(None if item is None else read(item, f"{field}[{i}]") for i, item in enumerate(items))


def _check_length(items: Any, where: str, devices: int) -> None:
    if not isinstance(items, list):
        raise UsageError(f"{where} is {_shown(items)}; it must be a list with one entry per device ({devices})")
    if len(items) != devices:
        raise UsageError(f"{where} has {len(items)} entries; it must have one for each of the {devices} devices")


def _number(value: Any, where: str, least: float, most: float) -> float:
    if value is None:
        raise UsageError(f"{where} is null; estimate links that were not measured, as `swarmnode status --export` does")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"{where} is {_shown(value)}; it must be a number")
    if not least <= value <= most:  # also true for NaN
        raise UsageError(f"{where} is {_shown(value)}; it must be between {least:g} and {most:g}")
    return float(value)


def _positive(most: float) -> Callable[[Any, str], float]:
    return lambda value, where: _number(value, where, 1e-6, most)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT_CHARS:
        raise UsageError(
            f"{where} is {_shown(value)}; it must be a text of at most {MAX_TEXT_CHARS} printable characters"
        )
    return value


def _shown(value: Any) -> str:
    """Return a value as text for a message: on one line, of at most 40 characters."""
    text = str(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def _frozen(matrix: Floats) -> Floats:
    matrix.setflags(write=False)
    return matrix
