"""Stop strings: a text ends before the first of them, wherever the borders of tokens are."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Lets a text through as it comes, but for its end where that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None  # which of them ended the text
        self.rest = ""  # and what came after it in the same breath

    def __repr__(self) -> str:
        return f"<StopStrings {self._stops!r}, {'found' if self.found is not None else f'{len(self._held)} characters held back'}>"

    def push(self, text: str) -> str:
        """What is certain to come before any stop string, once this has been said. Nothing more after one was found."""
        if self.found is not None:
            return ""
        held = self._held + text
        ends = [(begin + len(stop), begin) for stop in self._stops if (begin := held.find(stop)) >= 0]
        if ends:  # the one that was said first, so that it does not matter how much came at once
            end, begin = min(ends)
            self.found, self.rest, self._held = held[begin:end], held[end:], ""
            return held[:begin]
        kept = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def flush(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that is a beginning of the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if stop.startswith(text[-length:])), 0)
