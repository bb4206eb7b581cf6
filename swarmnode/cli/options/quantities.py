"""Sizes, rates and spans as people type them. Whatever could be read in two ways is refused with what to add."""

from __future__ import annotations

import re

from swarmnode.errors import UsageError
from swarmnode.plan.view import Span

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES = {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_bytes(text: str, option: str) -> int:
    """A size like 6GB or 512MiB, in bytes. Raises UsageError, also for a number without a unit."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?", lowered)
    if match is None:
        raise UsageError(f"{option} {text}: it is not a size; write it as 6GB or 512MiB")
    if lowered[-1].isdigit():
        raise UsageError(f"{option} {text}: of what? Add the unit, as in {text.strip()}GB or {text.strip()}MiB")
    size_bytes = int(float(match[1]) * (_PREFIXES | _BINARY_PREFIXES)[match[2] or ""])
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
    return float(match[1]) * _PREFIXES[match[2] or match[3] or ""]


def parse_share(text: str, option: str, *, zero: bool = False) -> float:
    """A share like 25%, up to 1, and 0 where that may be. Raises UsageError, also for a number without the sign."""
    match = re.fullmatch(_NUMBER + "%", text.strip())
    if match is None or not 0 <= float(match[1]) <= 100 or not (zero or float(match[1])):
        raise UsageError(f"{option} {text}: it is not a share; write it as 25%")
    return float(match[1]) / 100


def parse_span(text: str, option: str = "--span") -> Span:
    """A span like 0:6. Raises UsageError."""
    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option} {text}: not a span; write it as A:B with A < B, for units A to B-1")
    return Span(int(match[1]), int(match[2]))
