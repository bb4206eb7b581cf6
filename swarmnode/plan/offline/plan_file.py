"""Plan in a file, as `swarmnode plan --model … --json` prints it: the layers of each device, and the pipelines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.files import read_bounded
from swarmnode.plan.view import Span

MAX_FILE_BYTES = 16 << 20
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
            content = read_bounded(path, MAX_FILE_BYTES)
            if content is None:
                raise UsageError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB, so it is not a plan")
            return _parse(json.loads(content))
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


def _parse(values: dict[str, Any]) -> PlanFile:
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    stages = tuple(_stages(values["stages"]))
    pipelines = tuple(tuple(map(_number, pipeline)) for pipeline in values["pipelines"])
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
        span = Span(*map(_number, row["units"]))
        if span.start >= span.end:
            raise ValueError(f"layers {list(span)} are an empty range")
        yield span, tuple(map(_number, row["devices"]))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not the number of a layer or device")
    return value
