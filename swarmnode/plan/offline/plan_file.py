"""A plan in a file, as `swarmnode plan --model … --json` prints it: who holds which units, and the pipelines."""

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
    """`stages`: units, and the devices that hold them, by number in the network. `pipelines`: devices, stage after stage.
    `peers` and `swarm` (in hex): whose devices these are, where the network was a swarm's; else empty."""

    units: int
    stages: tuple[tuple[Span, tuple[int, ...]], ...]
    pipelines: tuple[tuple[int, ...], ...]
    peers: tuple[str, ...] = ()
    swarm: str = ""

    @classmethod
    def load(cls, path: str | Path) -> PlanFile:
        """The plan in a file. Raises UsageError, naming the file, where it is not one."""
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
        """Return what each device of a network holds; an empty span if it is not used. Raises UsageError if the plan has
        another number of units or names a device that the network does not have."""
        if self.units != units:
            raise UsageError(f"the plan is for {self.units} units, and the model has {units}")
        named = [device for _, members in self.stages for device in members]
        most = max(named + [device for pipeline in self.pipelines for device in pipeline], default=0)
        if most >= devices:
            raise UsageError(f"the plan names device {most}, and the network has {devices}, from 0 on")
        held = {device: span for span, members in self.stages for device in members}
        return [held.get(device, NOTHING) for device in range(devices)]

    def check_swarm(self, swarm: str) -> None:
        """Raises UsageError where the plan is not for this swarm, whose id is in hex, or names devices without a peer."""
        if self.swarm != swarm:
            raise UsageError("the plan is not for this swarm: plan on what `swarmnode network` writes of it")
        self.spans(len(self.peers), self.units)

    def span_of(self, peer: str, units: int) -> Span:
        """What a peer of its swarm, whose model has so many units, holds; nothing, where the plan does without it. Raises
        UsageError."""
        held = dict(zip(self.peers, self.spans(len(self.peers), units), strict=True))
        return held.get(peer, NOTHING)


def _parse(values: dict[str, Any]) -> PlanFile:
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    stages = tuple(_stages(values["stages"]))
    pipelines = tuple(tuple(map(_number, pipeline)) for pipeline in values["pipelines"])
    peers = tuple(map(str, values.get("peers", ())))
    ends = [0, *(span.end for span, _ in stages)]
    if not stages or [span.start for span, _ in stages] != ends[:-1]:
        raise ValueError("its stages do not follow one another from the first unit on")
    twice = [device for device, count in Counter(each for _, held in stages for each in held).items() if count > 1]
    if twice:
        raise ValueError(f"device {twice[0]} stands in two places")
    if len(set(peers)) < len(peers):
        raise ValueError("a peer is named twice")
    return PlanFile(ends[-1], stages, pipelines, peers, str(values.get("swarm", "")))


def _stages(rows: list[dict[str, Any]]) -> Iterator[tuple[Span, tuple[int, ...]]]:
    for row in rows:
        span = Span(*map(_number, row["units"]))
        if span.start >= span.end:
            raise ValueError(f"units {list(span)} are none")
        yield span, tuple(map(_number, row["devices"]))


def _number(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a number of a unit or device")
    return value
