"""Sizes, rates and spans as people type them. Whatever could be read in two ways is refused with what to add."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.plan.view import Span

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES = {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
MAX_BYTES = 10**18
LEAST_BPS, MAX_BPS = 9600, 10**15  # below, links' heartbeats alone come too late
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_bytes(text: str, option: str) -> int:
    """A size like 6GB or 512MiB, in bytes. Raises UsageError, also for a number without a unit."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?", lowered)
    if match is None:
        raise UsageError(f"{option} {text}: it is not a size; write it as 6GB or 512MiB")
    if lowered[-1].isdigit():
        raise UsageError(f"{option} {text}: of what? Add the unit, as in {text.strip()}GB or {text.strip()}MiB")
    exact_bytes = float(match[1]) * (_PREFIXES | _BINARY_PREFIXES)[match[2] or ""]
    if exact_bytes > MAX_BYTES:
        raise UsageError(f"{option} {text}: no machine has so much; write it as 6GB or 512MiB")
    size_bytes = int(exact_bytes)
    if not size_bytes:
        raise UsageError(f"{option} {text}: nothing; leave the option away, or give a size like 6GB")
    return size_bytes


def parse_rate(text: str, option: str) -> float:
    """A rate like 8Mbit or 500kbit/s, in bits/s. Raises UsageError, also for a number without a unit."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"(?:([kmg]?)(?:bits?(?:/s)?|bps)|([kmg]))", lowered)
    if match is None and re.fullmatch(_NUMBER, lowered):
        raise UsageError(f"{option} {text}: of what? Add the unit, as in {text.strip()}Mbit (a second)")
    if match is None or not float(match[1]):
        raise UsageError(f"{option} {text}: it is not a rate; write it as 8Mbit or 500kbit (bits a second)")
    rate_bps = float(match[1]) * _PREFIXES[match[2] or match[3] or ""]
    if not LEAST_BPS <= rate_bps <= MAX_BPS:
        raise UsageError(
            f"{option} {text}: peers stay in touch at {LEAST_BPS / 1e3:g}kbit at least, and at {MAX_BPS / 1e12:g}Tbit at most"
        )
    return rate_bps


def parse_share(text: str, option: str, *, zero: bool = False) -> float:
    """A share like 25%, up to 1, and 0 where that may be. Raises UsageError, also for a number without the sign."""
    match = re.fullmatch(_NUMBER + "%", text.strip())
    if match is None or not 0 <= float(match[1]) <= 100 or not (zero or float(match[1])):
        raise UsageError(f"{option} {text}: it is not a share; write it as 25%")
    return float(match[1]) / 100


def parse_name(text: str, option: str = "--name") -> str:
    """What a node is called, to be shown to others; empty where it has no name. Raises UsageError."""
    from swarmnode.swarm.records.announcement import MAX_NAME_CHARS

    if len(text) > MAX_NAME_CHARS or not text.isprintable() or text != text.strip():
        raise UsageError(
            f"{option} {text[:MAX_NAME_CHARS]!r}: a node's name has up to {MAX_NAME_CHARS} printable characters"
        )
    return text


def parse_span(text: str, option: str = "--span") -> Span:
    """A span like 0:6. Raises UsageError."""
    from swarmnode.plan.view import Span

    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option} {text}: not a span; write it as A:B with A < B, for units A to B-1")
    return Span(int(match[1]), int(match[2]))
