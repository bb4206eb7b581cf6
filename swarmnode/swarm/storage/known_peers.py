"""The last good addresses of a swarm's peers, kept between runs, so that joining needs no bootstrap."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.storage.kept_file import read_kept, try_to_keep

MAX_PEERS = 64
MAX_FILE_BYTES = 1 << 18


class KnownPeer(msgspec.Struct, frozen=True):
    """When a peer was last seen (unix time, seconds) and its multiaddrs with /p2p/."""

    seen: float
    addresses: tuple[str, ...]


class KnownPeers:
    """A bounded file of addresses. A missing or damaged file is an empty one: it is only a help."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._peers = read_kept(path, dict[PeerId, KnownPeer], max_bytes=MAX_FILE_BYTES) or {}
        self._changed = False

    def __repr__(self) -> str:
        return f"<KnownPeers {len(self._peers)} in {self.path.name}>"

    def addresses(self) -> list[str]:
        """All known multiaddrs, of the peers seen last first."""
        ordered = sorted(self._peers.values(), key=lambda peer: -peer.seen)
        return [address for peer in ordered for address in peer.addresses]

    def remember(self, announcements: Iterable[Announcement], now: float, *, own: PeerId | None = None) -> None:
        """Note the addresses of live peers; the peers seen least recently give way."""
        for announcement in announcements:
            if announcement.peer == own or not announcement.addresses:
                continue
            addresses = tuple(f"{address}/p2p/{announcement.peer}" for address in announcement.addresses)
            known = self._peers.get(announcement.peer)
            self._changed |= known is None or known.addresses != addresses
            self._peers[announcement.peer] = KnownPeer(now, addresses)
        newest = sorted(self._peers.items(), key=lambda item: -item[1].seen)[:MAX_PEERS]
        self._peers = dict(newest)

    def save(self) -> None:
        """Write the file if an address changed since the last time. A full disk costs only this help."""
        if self._changed:
            self._changed = False
            try_to_keep(self.path, self._peers, "addresses of peers are")
