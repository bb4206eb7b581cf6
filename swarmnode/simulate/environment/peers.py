"""Simulated peer: its device, span and state; and the times at which peers leave and return."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.files import parse_json, read_bounded
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.placement import Joiner, Move, MovePolicy
from swarmnode.plan.view import PeerView, Span
from swarmnode.simulate.environment.devices import SimulatedDevice
from swarmnode.swarm.records.announcement import State

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
