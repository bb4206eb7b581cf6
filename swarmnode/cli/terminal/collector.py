"""Python's garbage collector, held back while a command starts."""

from __future__ import annotations

import asyncio
import gc

LONGEST_S = 60.0


class CollectorPause:
    """No collections from now until `end`, at the latest when it is left, or when a minute has gone by on the running loop.

    While modules are imported nothing becomes garbage, yet the collector looks through everything again and again: a quarter of the
    CPU that a start takes. What is there at the end stays out of all later collections, too, which are shorter for it.
    """

    def __init__(self) -> None:
        self._paused = True
        gc.disable()
        asyncio.get_running_loop().call_later(LONGEST_S, self.end)

    def __repr__(self) -> str:
        return f"<CollectorPause {'on' if self._paused else 'over'}>"

    def __enter__(self) -> CollectorPause:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Collect as usual. Safe to call twice."""
        if self._paused:
            self._paused = False
            gc.freeze()
            gc.enable()
