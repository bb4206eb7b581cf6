"""Limits on the streams that other peers open here, before and after they have been admitted."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarmnode.net.interfaces import Stream
from swarmnode.net.limits.address_group import Claimant
from swarmnode.net.limits.fair_share import FairPace, FairShare, Pace

# Streams without a greeting yet; one that stays without is dropped after seconds.
HALF_OPEN, HALF_OPEN_OF_PEER, HALF_OPEN_OF_GROUP = 512, 32, 128
OPEN, OPEN_OF_PEER, OPEN_OF_GROUP = 2048, 64, 512
NEW_OF_PEER, NEW_OF_GROUP = Pace(32, 128), Pace(128, 512)  # streams


class StreamLimits:
    """Limits on incoming streams of all protocols together. Each stream takes a socket and some 128 KiB."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._half_open: FairShare[Stream] = FairShare(
            HALF_OPEN, of_peer=HALF_OPEN_OF_PEER, of_group=HALF_OPEN_OF_GROUP
        )
        self._open: FairShare[Stream] = FairShare(OPEN, of_peer=OPEN_OF_PEER, of_group=OPEN_OF_GROUP)
        self._pace = FairPace(NEW_OF_PEER, NEW_OF_GROUP, clock=clock)

    def __repr__(self) -> str:
        return f"<StreamLimits {len(self._open)} open, {len(self._half_open)} not greeted>"

    @property
    def half_open(self) -> int:
        """Number of streams that have not been greeted yet."""
        return len(self._half_open)

    def enter(self, stream: Stream) -> bool:
        """Count a new stream and return whether it may stay. A stream of the peer with most may be aborted for it."""
        claimant = Claimant(stream.group, stream.peer)
        return self._pace.wait_s(claimant, within_s=0) == 0 and _take(self._half_open, stream, claimant)

    def let_in(self, stream: Stream) -> None:
        """Count a stream among the open ones, as its peer was admitted. It is aborted if there is no place."""
        if stream in self._half_open:
            self._half_open.leave(stream)
            if not _take(self._open, stream, Claimant(stream.group, stream.peer)):
                stream.abort()

    def leave(self, stream: Stream) -> None:
        """Stop counting a stream. Calling it again changes nothing."""
        self._half_open.leave(stream)
        self._open.leave(stream)


def _take(shares: FairShare[Stream], stream: Stream, claimant: Claimant) -> bool:
    yielding = shares.take(stream, claimant)
    if yielding is not None and yielding is not stream:
        yielding.abort()
    return yielding is not stream


class CountedStream(Stream):
    """Stream counted by `limits`; None for a stream that this peer opened."""

    limits: StreamLimits | None = None

    def let_in(self) -> None:
        if self.limits is not None:
            self.limits.let_in(self)

    def give_place_up(self) -> None:
        if self.limits is not None:
            self.limits.leave(self)
