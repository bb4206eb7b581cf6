"""Rules of lending as users write them: in HOME/rules.toml, or as a flag, which overrides the file.

A rule in the file is named after its flag, with underscores: max_load = "25%" is --max-load 25%.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmnode.cli.options.files import read_toml
from swarmnode.cli.options.quantities import parse_share
from swarmnode.config import parse_bytes
from swarmnode.errors import UsageError
from swarmnode.lending.lending import DAYS, Hours, Rules
from swarmnode.terminal.formatting import parse_duration
from swarmnode.terminal.option import definitions, file_key, option, path_option

FILE = "rules.toml"
LAST_DAY = 28  # every month has this day


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} = {value}: write it in quotes")
    return value.strip()


def _yes(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise UsageError(f"{name} = {value}: write true or false")
    return value


def _programs(value: Any, name: str) -> frozenset[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise UsageError(f"{name} = {value}: write a list of programs' names")
    return frozenset(value)


def _hours(text: str, name: str) -> Hours:
    match = re.fullmatch(r"(\d{1,2}:\d\d)-(\d{1,2}:\d\d)", text)
    try:
        start, end = (datetime.time.fromisoformat(part.zfill(5)) for part in (match.groups() if match else ()))
    except ValueError:
        raise UsageError(f"{name} {text}: write the hours as 22:00-07:00") from None
    if start == end:
        raise UsageError(f"{name} {text}: it begins and ends at the same time; leave it out to lend at all hours")
    return Hours(start, end)


def _days(text: str, name: str) -> frozenset[int]:
    days: set[int] = set()
    for part in text.lower().split(","):
        names = part.strip().split("-")
        if len(names) > 2 or not set(names) <= set(DAYS):
            raise UsageError(f"{name} {text}: write the days as mon-fri or sat,sun")
        start, end = DAYS.index(names[0]), DAYS.index(names[-1])
        days.update((start + step) % 7 for step in range((end - start) % 7 + 1))
    return frozenset(days)


def _day(text: str, name: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= LAST_DAY:
        raise UsageError(f"{name} {text}: give the day of the month on which it begins, 1 to {LAST_DAY}")
    return int(text)


def _rule(
    help_text: str, flag: str, parse: Callable[[Any, str], Any], metavar: str | None = None, default: Any = None
) -> Any:
    """Define the option of a rule. Its value is a text unless `default` is of another kind; files and errors name it by its key."""
    name = file_key(flag)

    def read(value: Any, _flag: str) -> Any:
        return parse(_text(value, name) if default is None else value, name)

    return option(default, help_text, flag, parse=read, metavar=metavar)


@dataclass(frozen=True)
class RuleOptions:
    """Options of the rules of lending, by the names of the fields of Rules. A rule that is not given is None or empty."""

    rules_file: Path | None = path_option(
        "File of rules for when to lend; default: rules.toml in the home folder.", "--rules"
    )
    only_idle_s: float | None = _rule(
        "Lend only if nobody has typed for this time.", "--only-idle", parse_duration, "10m"
    )
    max_others_load: float | None = _rule(
        "Pause while other programs use more of the CPUs than this.", "--max-load", parse_share, "25%"
    )
    exclusive: frozenset[str] = _rule(
        "Pause while this program runs. Repeatable.", "--exclusive", _programs, "PROGRAM", default=[]
    )
    hours: Hours | None = _rule("Lend only at these hours.", "--hours", _hours, "22:00-07:00")
    days: frozenset[int] | None = _rule("Lend only on these days.", "--days", _days, "mon-fri")
    on_mains: bool = _rule("Pause on battery.", "--on-mains", _yes, default=False)
    max_memory_pressure: float | None = _rule(
        "Pause while other programs wait for memory for more of the time than this.",
        "--max-pressure",
        parse_share,
        "10%",
    )
    monthly_bytes: int | None = _rule(
        "Pause for the rest of the month after sending and receiving this much.", "--monthly", parse_bytes, "500GB"
    )
    month_day: int | None = _rule("Day on which that month begins; default: the first.", "--month-day", _day, "15")
    unmetered: bool = _rule("Pause on a metered connection (NetworkManager).", "--unmetered", _yes, default=False)
    max_others_gpu_bytes: int | None = _rule(
        "Pause while other programs use more of a GPU's memory than this.", "--max-gpu-memory", parse_bytes, "2GB"
    )
    max_others_gpu_load: float | None = _rule(
        "Pause while other programs use more of a GPU's time than this.", "--max-gpu-load", parse_share, "25%"
    )


RULES = {
    file_key(definition.flag(field)): (field, definition)
    for field, definition in definitions(RuleOptions).items()
    if field != "rules_file"
}


def read_rules(home: Path, flags: RuleOptions = RuleOptions()) -> Rules:
    """Read the rules of a file (`rules.toml` in the home folder if it exists) and add those of `flags`, which override them. Raises
    UsageError."""
    texts = read_toml(flags.rules_file, home / FILE, what="a file of rules")
    given = {field: value for field, _ in RULES.values() if (value := getattr(flags, field))}
    return replace(parse_rules(texts), **given)


def parse_rules(texts: Mapping[str, Any]) -> Rules:
    """Read rules by their names in a file. Raises UsageError, which names the rule that is wrong."""
    unknown = sorted(texts.keys() - RULES.keys())
    if unknown:
        raise UsageError(f"there is no rule {unknown[0]!r}; choose from {', '.join(RULES)}")
    found = ((RULES[name], value) for name, value in texts.items())
    return Rules(**{field: definition.read(field, value) for (field, definition), value in found})
