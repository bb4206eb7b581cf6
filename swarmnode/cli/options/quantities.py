"""Sizes, rates and spans as users type them. A text with two possible meanings is refused, and the error shows how to write it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.plan.view import Span

_PREFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_PREFIXES = {f"{prefix}i": 1024**power for power, prefix in enumerate("kmgt", start=1)}
MAX_BYTES = 10**18
LEAST_BPS, MAX_BPS = 9600, 10**15  # at lower rates, even the links' heartbeats come too late
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def parse_bytes(text: str, option: str) -> int:
    """Return the bytes of a size like 6GB or 512MiB. Raises UsageError if `text` is no size, has no unit, is 0 or is too large."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?", lowered)
    if match is None:
        raise UsageError(f"{option} {text}: this is not a size; write it as 6GB or 512MiB")
    if lowered[-1].isdigit():
        raise UsageError(f"{option} {text}: the unit is missing; write {text.strip()}GB or {text.strip()}MiB")
    exact_bytes = float(match[1]) * (_PREFIXES | _BINARY_PREFIXES)[match[2] or ""]
    if exact_bytes > MAX_BYTES:
        raise UsageError(f"{option} {text}: no machine has that much; write it as 6GB or 512MiB")
    size_bytes = int(exact_bytes)
    if not size_bytes:
        raise UsageError(f"{option} {text}: this is nothing; leave the option out, or give a size like 6GB")
    return size_bytes


def parse_rate(text: str, option: str) -> float:
    """Return the bits per second of a rate like 8Mbit or 500kbit/s. Raises UsageError if `text` is no rate, has no unit or is out
    of range."""
    lowered = text.strip().lower()
    match = re.fullmatch(_NUMBER + r"(?:([kmg]?)(?:bits?(?:/s)?|bps)|([kmg]))", lowered)
    if match is None and re.fullmatch(_NUMBER, lowered):
        raise UsageError(f"{option} {text}: the unit is missing; write {text.strip()}Mbit (per second)")
    if match is None or not float(match[1]):
        raise UsageError(f"{option} {text}: this is not a rate; write it as 8Mbit or 500kbit (bits per second)")
    rate_bps = float(match[1]) * _PREFIXES[match[2] or match[3] or ""]
    if not LEAST_BPS <= rate_bps <= MAX_BPS:
        raise UsageError(
            f"{option} {text}: give a rate from {LEAST_BPS / 1e3:g}kbit, which keeps links alive, to {MAX_BPS / 1e12:g}Tbit"
        )
    return rate_bps


def parse_share(text: str, option: str, *, zero: bool = False) -> float:
    """Return a share like 25% as a number from 0 to 1; 0 is allowed only with `zero`. Raises UsageError for anything else, also for
    a number without the percent sign."""
    match = re.fullmatch(_NUMBER + "%", text.strip())
    if match is None or not 0 <= float(match[1]) <= 100 or not (zero or float(match[1])):
        raise UsageError(f"{option} {text}: this is not a share; write it as 25%")
    return float(match[1]) / 100


def parse_name(text: str, option: str = "--name") -> str:
    """Return the name of a node, which others see; it may be empty. Raises UsageError if the name is too long or not printable."""
    from swarmnode.swarm.records.announcement import MAX_NAME_CHARS

    if len(text) > MAX_NAME_CHARS or not text.isprintable() or text != text.strip():
        raise UsageError(
            f"{option} {text[:MAX_NAME_CHARS]!r}: give a name of at most {MAX_NAME_CHARS} printable characters"
        )
    return text


def parse_span(text: str, option: str = "--span") -> Span:
    """Return the range of layers in a text like 0:6. Raises UsageError for any other text."""
    from swarmnode.plan.view import Span

    match = re.fullmatch(r"(\d+):(\d+)", text.strip())
    if match is None or int(match[1]) >= int(match[2]):
        raise UsageError(f"{option} {text}: this is not a span; write it as A:B with A < B, for layers A to B-1")
    return Span(int(match[1]), int(match[2]))
