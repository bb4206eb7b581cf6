"""Shares, names and spans as users type them. A text with two possible meanings is refused, and the error shows how to write it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError

if TYPE_CHECKING:
    from swarmnode.plan.view import Span

_NUMBER = r"(\d+(?:\.\d+)?)\s*"


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
