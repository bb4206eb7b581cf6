"""A clock that shows what a test has set it to."""

from __future__ import annotations


class Watch:
    """Called for the time, which is `now_s` until a test moves it."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
