"""Who comes and goes: not at all, at a rate, or as a trace tells."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

from swarmnode.errors import UsageError
from swarmnode.files.bounded import read_bounded

MAX_FILE_BYTES = 64 << 20
AWAY_S = 300.0  # mean time until another peer takes a leaver's place


@dataclass(frozen=True, order=True)
class Change:
    """A device goes away (without a word), or comes back."""

    at_s: float
    device: int
    up: bool


def steady_churn(devices: int, rate_per_hour: float, seconds: float, chance: random.Random) -> list[Change]:
    """Each peer leaves at random (Poisson) `rate_per_hour` times an hour, and after a while another one takes its place."""
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
    """A JSON list of [seconds, device, "up" or "down"] in a file. Raises UsageError where it is not one."""
    try:
        content = read_bounded(path, MAX_FILE_BYTES)
        if content is None:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES >> 20} MiB")
        rows = json.loads(content)
        if not isinstance(rows, list):
            raise ValueError("it is no list")
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
