"""The rules of lending as people write them: in HOME/rules.toml, or in a flag, which counts before the file.

A rule is called in the file as its flag is, with underlines: max_load = "25%" is --max-load 25%.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmnode.cli.options.option import definitions, option, path_option
from swarmnode.cli.options.quantities import parse_bytes, parse_share
from swarmnode.cli.options.toml_file import read_toml
from swarmnode.cli.terminal.durations import parse_duration
from swarmnode.errors import UsageError
from swarmnode.lending.rules import DAYS, Hours, Rules

FILE = "rules.toml"
LAST_DAY = 28  # that every month has


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


def _rule(default: Any, help_text: str, flag: str, parse: Callable[[Any, str], Any], **details: Any) -> Any:
    """Define a rule: the flag, and the name that it has in the file and in what is told of it."""
    name = flag.lstrip("-").replace("-", "_")
    return option(default, help_text, flag, parse=lambda value, _flag: parse(value, name), **details)


@dataclass(frozen=True)
class RuleOptions:
    """The rules that flags give, by the names of the fields of Rules; a rule that is not given is None or empty."""

    rules_file: Path | None = path_option("Rules for when to lend; default: rules.toml in the home folder.", "--rules")
    only_idle_s: float | None = _rule(
        None,
        "Lend only while nobody has touched keyboard or mouse for so long.",
        "--only-idle",
        _seconds,
        metavar="10m",
    )
    max_others_load: float | None = _rule(
        None, "Pause while other programs use more of the CPUs.", "--max-load", _share, metavar="25%"
    )
    exclusive: frozenset[str] = _rule(
        [], "Pause while this program runs. Repeatable.", "--exclusive", _programs, metavar="PROGRAM"
    )
    hours: Hours | None = _rule(None, "Lend at these hours only.", "--hours", _hours, metavar="22:00-07:00")
    days: frozenset[int] | None = _rule(None, "Lend on these days only.", "--days", _days, metavar="mon-fri")
    on_mains: bool = _rule(False, "Pause on battery.", "--on-mains", _yes)
    max_memory_pressure: float | None = _rule(
        None,
        "Pause while other programs wait for memory for more of the time.",
        "--max-pressure",
        _share,
        metavar="10%",
    )
    monthly_bytes: int | None = _rule(
        None,
        "Pause for the rest of a month in which so much was sent and received.",
        "--monthly",
        _bytes,
        metavar="500GB",
    )
    month_day: int | None = _rule(
        None, "The day on which that month begins; default: the first.", "--month-day", _day, metavar="15"
    )
    unmetered: bool = _rule(
        False, "Pause where the connection is paid by what it carries (NetworkManager).", "--unmetered", _yes
    )
    max_others_gpu_bytes: int | None = _rule(
        None, "Pause while other programs use more of a card's memory.", "--max-gpu-memory", _bytes, metavar="2GB"
    )
    max_others_gpu_load: float | None = _rule(
        None, "Pause while other programs use more of a card's time.", "--max-gpu-load", _share, metavar="25%"
    )


_RULES = {
    definition.flag(field).lstrip("-").replace("-", "_"): (field, definition)
    for field, definition in definitions(RuleOptions).items()
    if field != "rules_file"
}


def read_rules(home: Path, flags: RuleOptions = RuleOptions()) -> Rules:
    """Read the rules of a file (`rules.toml` in the home folder, if there is one) and add those of flags. Raises UsageError."""
    texts = read_toml(flags.rules_file, home / FILE, what="a file of rules")
    given = {field: value for field, _ in _RULES.values() if (value := getattr(flags, field))}
    return replace(parse_rules(texts), **given)


def parse_rules(texts: Mapping[str, Any]) -> Rules:
    """Read rules by the names that the file has for them. Raises UsageError, which names the one that is wrong."""
    unknown = sorted(texts.keys() - _RULES.keys())
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; there are {', '.join(_RULES)}")
    found = ((_RULES[name], value) for name, value in texts.items())
    return Rules(**{field: definition.read(field, value) for (field, definition), value in found})
