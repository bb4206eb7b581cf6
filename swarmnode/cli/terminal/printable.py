"""Text of strangers on a terminal: a model's answer, a peer's name. No character of it may be a command to the terminal."""

from __future__ import annotations

import json
import re
from typing import Any

# Controls of C0 and C1, which begin escape sequences, and those that turn the direction of what follows
# (https://www.unicode.org/reports/tr9, "Trojan Source" CVE-2021-42574). Joiners stay: scripts and emoji need them.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile(r"[\t\n]+")
REPLACEMENT = "\ufffd"


def printable(text: str) -> str:
    """The text with a replacement character for each that could command a terminal; lines and tabs stay."""
    return _COMMANDS.sub(REPLACEMENT, text)


def one_line(text: str) -> str:
    """The same on one line, as a name is shown."""
    return printable(_BREAKS.sub(" ", text))


def json_line(value: Any) -> str:
    """A JSON value on one line, of the same value to whoever parses it; what could command a terminal is escaped."""
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
