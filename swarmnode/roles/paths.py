"""What a node knows of its own place: round trips, bandwidths, a network coordinate, and how others get to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from swarmnode.net.coordinate import Coordinate, Surveyor
from swarmnode.net.interfaces import PeerId
from swarmnode.net.reachability import Evidence, Reachability, conclude, own_interfaces
from swarmnode.net.soundings import Soundings
from swarmnode.swarm.announcement import MAX_RTTS, Announcement, peer_digest

Known = Callable[[PeerId], Announcement | None]
"""What a peer announces at the moment; None where it is not known"""


class Paths:
    """Filled by the links in ordinary traffic (`soundings`), told by announcements (`figures`)."""

    def __init__(self, peer: PeerId, known: Known, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.soundings = Soundings(clock=clock, on_rtt=self._measured)
        self.reachability = Reachability.UNKNOWN
        self._surveyor = Surveyor(peer)
        self._known = known

    def __repr__(self) -> str:
        return f"<Paths {self.reachability.name} at {self.coordinate!r}, {self.soundings!r}>"

    @property
    def coordinate(self) -> Coordinate:
        """Our own."""
        return self._surveyor.coordinate

    def _measured(self, peer: PeerId, rtt_s: float) -> None:
        """Peers that announce nothing (clients, say) have no place of which we would learn ours."""
        announcement = self._known(peer)
        if announcement is not None:
            self._surveyor.measured(Coordinate.unpacked(announcement.coordinate), rtt_s)

    def look(self, addresses: Sequence[str], promised: Sequence[str], visitors: Sequence[str]) -> None:
        """Conclude anew how others get here (`net/reachability.py`)."""
        self.reachability = conclude(Evidence(addresses, own_interfaces(), promised, visitors))

    def figures(self) -> dict[str, Any]:
        """What the announcement says of them."""
        rtts_s = self.soundings.rtts_s(most=MAX_RTTS)
        return {
            "rtt_us": {peer_digest(peer): round(rtt_s * 1e6) for peer, rtt_s in rtts_s.items()},
            "coordinate": self.coordinate.packed(),
            "up_bps": self.soundings.up_bps,
            "down_bps": self.soundings.down_bps,
            "reachability": int(self.reachability),
        }
