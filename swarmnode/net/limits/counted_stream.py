"""Counted stream: one that counts against what a peer may have open, where the peer has opened it."""

from __future__ import annotations

from swarmnode.net.interfaces import Stream
from swarmnode.net.limits.stream_limits import StreamLimits


class CountedStream(Stream):
    """`limits` counts it; None where we have opened it ourselves."""

    limits: StreamLimits | None = None

    def let_in(self) -> None:
        if self.limits is not None:
            self.limits.let_in(self)

    def give_place_up(self) -> None:
        if self.limits is not None:
            self.limits.leave(self)
