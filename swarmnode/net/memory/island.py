"""Peers of a fake world that share one table."""

from __future__ import annotations

from collections.abc import Iterable

from swarmnode.net.interfaces import PeerId, Record


class Island:
    """Peers that have found one another, and the records that they share. Who only uses the table is none of its peers."""

    def __init__(self, peers: Iterable[PeerId]) -> None:
        self.peers = set(peers)
        self.records: dict[bytes, dict[bytes, Record]] = {}

    def __repr__(self) -> str:
        return f"<Island of {len(self.peers)} peers, {len(self.records)} keys>"

    def keep(self, key: bytes, subkey: bytes, record: Record) -> bool:
        """Keep a record unless one that expires later is there."""
        known = self.records.setdefault(key, {}).get(subkey)
        if known is not None and known.expires_at >= record.expires_at:
            return False
        self.records[key][subkey] = record
        return True

    def absorb(self, other: Island) -> None:
        """Be one island with another from now on."""
        self.peers |= other.peers
        for key, records in other.records.items():
            for subkey, record in records.items():
                self.keep(key, subkey, record)
