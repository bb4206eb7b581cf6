"""Traffic: what has gone over all links of a peer, by protocol. Links come and go, their bytes stay counted here."""

from __future__ import annotations

from collections import Counter

from swarmnode.metrics import table
from swarmnode.metrics.histogram import Histogram
from swarmnode.metrics.metric import Reading, Readings


class Traffic:
    """Bytes as our frames have them; what libp2p adds is not seen here."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._round_trips: dict[str, Histogram] = {}

    def __repr__(self) -> str:
        return f"<Traffic {self.sent_bytes.total()} bytes sent, {self.received_bytes.total()} received>"

    @property
    def total_bytes(self) -> int:
        """Sent and received."""
        return self.sent_bytes.total() + self.received_bytes.total()

    def note_round_trip(self, protocol: str, seconds: float) -> None:
        """A ping came back."""
        self._round_trips.setdefault(protocol, Histogram()).observe(seconds)

    def readings(self) -> Readings:
        """All of it."""
        for direction, counts in (("sent", self.sent_bytes), ("received", self.received_bytes)):
            for protocol, count in counts.items():
                yield Reading(table.LINK_BYTES, count, (protocol, direction))
        for protocol, round_trips in self._round_trips.items():
            yield Reading(table.ROUND_TRIP_SECONDS, round_trips, (protocol,))


def protocol_name(protocol: str) -> str:
    """`session` for `/swarmnode/session/1`."""
    return protocol.removeprefix("/swarmnode").strip("/").split("/")[0]
