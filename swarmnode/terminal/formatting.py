"""Text for terminals: strangers' names made safe, durations, URLs and JSON lines."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from typing import Any

from swarmnode.errors import UsageError

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
MAX_DURATION_S = 100 * 365 * 86_400
# Control characters of C0 and C1, which begin escape sequences, and those that change the direction of text
# (https://www.unicode.org/reports/tr9, "Trojan Source" CVE-2021-42574). Joiners stay: scripts and emoji need them.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile(r"[\t\n]+")
REPLACEMENT = "\ufffd"
LEAST_COLUMNS = 40


def printable(text: str) -> str:
    """Return the text with a replacement character for each character that could control a terminal; line breaks and tabs stay."""
    return _COMMANDS.sub(REPLACEMENT, text)


def one_line(text: str) -> str:
    """Return the text on one line, without characters that could control a terminal."""
    return printable(_BREAKS.sub(" ", text))


def wrapped(text: str, first: str = "", rest: str = "") -> str:
    """Return the text on lines as wide as the terminal, without characters that could control it. The first line begins with
    `first`, the others with `rest`. Words that are too long for a line stay whole."""
    width = max(LEAST_COLUMNS, shutil.get_terminal_size().columns)
    return textwrap.fill(
        one_line(text),
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def json_line(value: Any) -> str:
    """Return a JSON value on one line. Characters that could control a terminal are escaped, which does not change the parsed
    value."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def parse_duration(text: str, _flag: str = "") -> float:
    """Return the seconds of a duration like 90s, 30m, 12h, 7d or 4w. Raises UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip().lower())
    seconds = 0.0 if match is None else float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= MAX_DURATION_S:
        raise UsageError(f"{text!r} is not a duration; write it as 30m, 12h, 7d or 4w")
    return seconds


def parse_life(text: str, flag: str = "") -> float | None:
    """Return the seconds of a duration, or None for `never`. Raises UsageError for any other text."""
    return None if text == "never" else parse_duration(text, flag)


def format_duration(seconds: float) -> str:
    """Return a duration as text: `42 s`, `3:05 min` or `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    return f"{minutes // 60}:{minutes % 60:02} h"


def origin(host: str, port: int) -> str:
    """Return the URL of a host's name or IP address and a port, without a path."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
