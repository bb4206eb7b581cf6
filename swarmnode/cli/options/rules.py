"""The rules of lending as people write them: in HOME/rules.toml, or in a flag, which counts before the file.

only_idle = "10m"           # nobody has touched keyboard or mouse for so long
max_load = "25%"            # of all CPUs, by other programs
exclusive = ["blender"]     # programs beside which it does not lend
hours = "22:00-07:00"
days = "mon-fri"            # or "sat,sun"
on_mains = true
max_pressure = "10%"        # of the time some program waits for memory
monthly = "500GB"           # sent and received, in a month
month_day = "15"            # on which the month begins: 1 to 28
unmetered = true            # not where the connection is paid by what it carries
max_gpu_memory = "2GB"      # of a card's, used by other programs
max_gpu_load = "25%"        # of a card's time, by other programs
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from swarmnode.cli.options.quantities import parse_bytes, parse_share
from swarmnode.cli.options.toml_file import read_toml
from swarmnode.cli.terminal.durations import parse_duration
from swarmnode.errors import UsageError
from swarmnode.lending.rules import DAYS, Hours, Rules

FILE = "rules.toml"
MAX_FILE_BYTES = 1 << 16
LAST_DAY = 28  # that every month has


def read_rules(home: Path, given: Path | None = None, flags: Mapping[str, Any] = MappingProxyType({})) -> Rules:
    """The rules of a file (`rules.toml` in the home folder, where there is one) and of flags. Raises UsageError."""
    path = given or home / FILE
    file = read_toml(path, max_bytes=MAX_FILE_BYTES, what="a file of rules")
    if file is None and given is not None:
        raise UsageError(f"{path}: no such file")
    return parse_rules({**(file or {}), **{name: value for name, value in flags.items() if value}})


def parse_rules(texts: Mapping[str, Any]) -> Rules:
    """Rules by the names that the file has for them. Raises UsageError, which names the one that is wrong."""
    unknown = sorted(texts.keys() - _PARSERS.keys())
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; there are {', '.join(_PARSERS)}")
    return Rules(**{_PARSERS[name][0]: _PARSERS[name][1](value, name) for name, value in texts.items()})


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} = {value}: write it in quotes")
    return value.strip()


def _seconds(value: Any, name: str) -> float:
    return parse_duration(_text(value, name))


def _share(value: Any, name: str) -> float:
    return parse_share(_text(value, name), name)


def _bytes(value: Any, name: str) -> int:
    return parse_bytes(_text(value, name), name)


def _yes(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} = {value}: it is true or false")
    return value


def _programs(value: Any, name: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise UsageError(f"{name} = {value}: it is a list of programs' names")
    return frozenset(value)


def _hours(value: Any, name: str) -> Hours:
    match = re.fullmatch(r"(\d{1,2}:\d\d)-(\d{1,2}:\d\d)", _text(value, name))
    try:
        start, end = (datetime.time.fromisoformat(part.zfill(5)) for part in (match.groups() if match else ()))
    except ValueError:
        raise UsageError(f"{name} {value}: write the hours as 22:00-07:00") from None
    if start == end:
        raise UsageError(f"{name} {value}: from when to when? Leave it away to lend at all hours")
    return Hours(start, end)


def _days(value: Any, name: str) -> frozenset[int]:
    days: set[int] = set()
    for part in _text(value, name).lower().split(","):
        names = part.strip().split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            raise UsageError(f"{name} {value}: write the days as mon-fri or sat,sun")
        start, end = DAYS.index(names[0]), DAYS.index(names[-1])
        days.update((start + step) % 7 for step in range((end - start) % 7 + 1))
    return frozenset(days)


def _day(value: Any, name: str) -> int:
    text = _text(value, name)
    if not text.isdecimal() or not 1 <= int(text) <= LAST_DAY:
        raise UsageError(f"{name} {value}: the day of the month on which it begins, 1 to {LAST_DAY}")
    return int(text)


_PARSERS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "only_idle": ("only_idle_s", _seconds),
    "max_load": ("max_others_load", _share),
    "exclusive": ("exclusive", _programs),
    "hours": ("hours", _hours),
    "days": ("days", _days),
    "on_mains": ("on_mains", _yes),
    "max_pressure": ("max_memory_pressure", _share),
    "monthly": ("monthly_bytes", _bytes),
    "month_day": ("month_day", _day),
    "unmetered": ("unmetered", _yes),
    "max_gpu_memory": ("max_others_gpu_bytes", _bytes),
    "max_gpu_load": ("max_others_gpu_load", _share),
}

RULE_NAMES = tuple(_PARSERS)
