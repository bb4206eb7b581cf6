"""Memory of a peer between runs: manifests, addresses of peers, its membership of a swarm, and its owner's name.

It is only a help: missing or damaged parts are fetched or learned again.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from swarmnode.errors import LocalError, ProtocolError
from swarmnode.files import read_bounded, write_private
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import MAX_NAME_CHARS, Announcement
from swarmnode.swarm.records.manifest import MAX_MANIFEST_BYTES, swarm_id
from swarmnode.swarm.records.membership import Membership
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

log = logging.getLogger(__name__)

FOLDER = "manifests"
SUFFIX = ".manifest"
MAX_PEERS = 64
MAX_PEERS_FILE_BYTES = 1 << 18
MAX_MEMBERSHIP_BYTES = 1 << 22
OWN_NAME = "name"  # file in the home folder
MAX_OWN_NAME_BYTES = 4 * MAX_NAME_CHARS + 1


def own_name(home: Path) -> str:
    """Return the name under which others see the peers of this home; empty if none was chosen, or its file is damaged."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        text = (read_bounded(home / OWN_NAME, MAX_OWN_NAME_BYTES) or b"").decode().strip()
        return text if text.isprintable() and len(text) <= MAX_NAME_CHARS else ""
    return ""


def store_own_name(home: Path, name: str) -> None:
    """Keep the name under which others see the peers of this home. Raises LocalError if the file cannot be written."""
    write_private(home / OWN_NAME, f"{name}\n".encode(), make_folder=True)


def machine_name() -> str:
    """Return this machine's host name without its domain, as a name that others may see; empty if it has none."""
    return "".join(filter(str.isprintable, socket.gethostname().partition(".")[0])).strip()[:MAX_NAME_CHARS]


class ManifestCache:
    """Cache of manifests on the disk, under one home folder, by the id of the swarm."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def get(self, swarm: bytes) -> bytes | None:
        """Return the manifest of the swarm with this id; None if it is missing or damaged."""
        with contextlib.suppress(OSError):
            raw = read_bounded(self._path(swarm), MAX_MANIFEST_BYTES)
            return raw if raw is not None and swarm_id(raw) == swarm else None
        return None

    def store(self, raw: bytes) -> None:
        """Keep a manifest. If that fails, the failure is logged."""
        try:
            write_private(self._path(swarm_id(raw)), raw, make_folder=True)
        except LocalError as error:
            log.info("cannot keep the manifest, which is fetched again next time: %s", error)

    def _path(self, swarm: bytes) -> Path:
        return self._folder / f"{swarm.hex()}{SUFFIX}"


class KnownPeer(msgspec.Struct, frozen=True):
    """Time at which a peer was last seen (unix time, seconds), and its multiaddrs with /p2p/."""

    seen: float
    addresses: tuple[str, ...]


class KnownPeers:
    """Addresses of the peers seen last, in a file of bounded size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._peers = read_stored(path, dict[PeerId, KnownPeer], max_bytes=MAX_PEERS_FILE_BYTES) or {}
        self._changed = False

    def addresses(self) -> list[str]:
        """Return all known multiaddrs, those of the peers seen last first."""
        ordered = sorted(self._peers.values(), key=lambda peer: -peer.seen)
        return [address for peer in ordered for address in peer.addresses]

    def remember(self, announcements: Iterable[Announcement], now: float, *, own: PeerId | None = None) -> None:
        """Note the addresses of live peers. Above the limit, the peers seen least recently are dropped."""
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
        """Write the file if an address changed since the last time. A failure is logged."""
        if self._changed:
            self._changed = False
            try_to_keep(self.path, self._peers, "addresses of peers are")


class _Content(msgspec.Struct):
    """Content of the file, in JSON; bytes are base64."""

    certificate: bytes = b""
    revocations: bytes = b""
    uses: tuple[bytes, ...] = ()  # certificates


class MembershipFile:
    """Certificate, newest revocation list and uses of limited invites, in one file for each swarm and peer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content = read_stored(path, _Content, max_bytes=MAX_MEMBERSHIP_BYTES) or _Content()

    @property
    def certificate(self) -> bytes:
        """Certificate of the last run; empty if there is none. With it, a returning peer is no new user of its invite."""
        return self._content.certificate

    def load(self, membership: Membership, now: float) -> None:
        """Pass the content of the file to `membership`. Reading stops, with a warning, at a part that the owner did not
        sign."""
        try:
            if self._content.revocations:
                membership.adopt_list(self._content.revocations)
            for certificate in self._content.uses:
                membership.record_use(certificate, now)
        except ProtocolError as error:
            log.warning("%s cannot be used: %s", self.path, error)

    def save(self, membership: Membership) -> None:
        """Write the file if anything is new. A failure is logged."""
        uses = tuple(use.member.certificate for use in membership.uses)
        content = _Content(membership.certificate, membership.revocations_bytes, uses)
        if content != self._content and try_to_keep(self.path, content, "what is known of members is"):
            self._content = content
