"""What the table keeps, and a reader believes, of a swarm: announcements under the keys where they belong."""

from __future__ import annotations

from collections.abc import Callable

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import RecordValidator
from swarmnode.swarm.peers.shards import homes, places_of
from swarmnode.swarm.records.announcement import MAX_LIFE_S, MAX_SKEW_S, Verify, Vouch, announcement_reader


def announcement_validator(
    swarm_id: bytes,
    verify: Verify,
    now: Callable[[], float],
    max_life_s: float = MAX_LIFE_S,
    vouch: Vouch | None = None,
) -> RecordValidator:
    """Announcements that hold, each under its peer's id, that expire soon. A record that holds is still refused under a key that is
    not one of its peer's, of which there are a hundred at most: else one record would fill the table."""
    read = announcement_reader(swarm_id, verify, vouch)

    def valid(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        try:
            announcement = read(value)
        except ProtocolError:
            return False
        if announcement.peer.encode() != subkey:
            return False
        places = (*places_of(announcement.span), *(places_of(announcement.left) if any(announcement.left) else ()))
        in_bounds = expires_at <= announcement.expires_at + 1e-3 and expires_at <= now() + max_life_s + MAX_SKEW_S
        return in_bounds and key in homes(swarm_id, announcement.peer, places)

    return valid
