"""Spans of time as people write them."""

from __future__ import annotations

import re

from swarmnode.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
MAX_DURATION_S = 100 * 365 * 86_400


def parse_duration(text: str, _flag: str = "") -> float:
    """Return the seconds of a span like 90s, 30m, 12h, 7d or 4w. Raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    seconds = 0.0 if match is None else float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= MAX_DURATION_S:
        raise UsageError(f"{text!r} is not a span of time; write it as 30m, 12h, 7d or 4w")
    return seconds


def parse_life(text: str, flag: str = "") -> float | None:
    """Return the seconds of a span, and None for `never`. Raises UsageError."""
    return None if text == "never" else parse_duration(text, flag)


def format_duration(seconds: float) -> str:
    """`42 s`, `3:05 min` or `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"
