"""`NAME.guests`, the owner's list of issued invites and of revocations. Of secrets it has only the invite that `host` showed last.

It is only a help: without it, unused invites can neither be listed nor be revoked by a part of their id or by their note. Nor can
members that are offline, without `NAME.members` beside it: the list of peers that came by invites.

The owner's key on disk: PKCS #8 in PEM (RFC 5958), encrypted with the owner's password, if there is one (PBES2, RFC 8018).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from swarmnode.errors import UsageError
from swarmnode.files import write_private
from swarmnode.net.identity import SigningKey
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.invite import Grant
from swarmnode.swarm.storage.small_files import VersionedFile, load_user_file, read_user_file

OWNER_SUFFIX = ".owner"
MAX_KEY_BYTES = 1 << 14
LOCKED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"  # RFC 7468


def save_owner_key(key: SigningKey, path: Path, password: str) -> None:
    """Write the key atomically, readable by its owner alone, and encrypted unless the password is empty. Raises LocalError if the
    file cannot be written."""
    private = Ed25519PrivateKey.from_private_bytes(key.seed)
    lock: KeySerializationEncryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    write_private(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))


def is_locked(path: Path) -> bool:
    """Return whether the key in a file is encrypted; False if there is no such file. Raises UsageError if it cannot be read."""
    data = read_user_file(path, max_bytes=MAX_KEY_BYTES, what="an owner's key")
    return data is not None and LOCKED in data


def load_owner_key(path: Path, password: str | None) -> SigningKey:
    """Load the key from a file. The password of one that is not encrypted does not count.

    Raises UsageError if there is no such file, the password does not fit, or it is not an Ed25519 key.
    """
    data = read_user_file(path, max_bytes=MAX_KEY_BYTES, what="an owner's key")
    if data is None:
        raise UsageError(f"{path}: no such file; only the swarm's owner has it and can do this")
    return parse_owner_key(data, password if LOCKED in data else None, source=str(path))


def parse_owner_key(pem: bytes, password: str | None, *, source: str) -> SigningKey:
    """Load the key from a PEM text; `password` is None if it is not encrypted.

    Raises UsageError that names `source` if the password does not fit, the text is damaged, or it is not an Ed25519
    key.
    """
    try:
        key = load_pem_private_key(pem, None if password is None else password.encode())
    except TypeError:
        needs = "needs a password" if password is None else "is not encrypted and takes none"
        raise UsageError(f"the owner's key in {source} {needs}") from None
    except (ValueError, UnsupportedAlgorithm):
        raise UsageError(
            f"the owner's key in {source} does not open: the password is wrong, or the text damaged"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"the key in {source} is not an Ed25519 key; give the file that `create` wrote beside the .swarm file"
        )
    return SigningKey(key.private_bytes_raw())


SUFFIX = ".guests"
FORMAT = 1
MAX_FILE_BYTES = 1 << 24
MEMBERS_SUFFIX = ".members"
MAX_PEERS_OF_AN_INVITE = 1024  # a holder of an invite for any number of machines makes as many identities as it likes
MAX_PEERS = 16_384
SEEN_STEP_S = 300
WHAT = "a guestbook"


class IssuedInvite(msgspec.Struct, frozen=True):
    """An issued invite. Times are unix seconds; `expires_at` 0 is never, `uses` 0 any number."""

    invite: str  # id, in hex
    role: str
    issued_at: int
    expires_at: int
    uses: int
    peer: PeerId
    group: str
    note: str = ""

    def terms(self) -> dict[str, Any]:
        """Return its terms for people and scripts. None means no expiry, any number of uses, any peer."""
        return {
            "id": self.invite,
            "role": self.role,
            "expires_at": self.expires_at or None,
            "uses": self.uses or None,
            "peer": self.peer or None,
            "group": self.group,
        }


class AdmittedPeer(msgspec.Struct, frozen=True):
    """A peer that came by an invite, and its terms. Times are unix seconds; `expires_at` 0 is never. `invite` and `home` are in
    hex. `home` is empty if the peer named none; `name` is the one announced last."""

    peer: PeerId
    invite: str
    home: str
    role: str
    group: str
    expires_at: int
    joined_at: int
    seen_at: int
    name: str = ""

    @property
    def user(self) -> str:
        """Member that the peer belongs to: its home, or the peer alone if it named none."""
        return self.home or self.peer


class _MembersFile(VersionedFile):
    peers: list[AdmittedPeer] = msgspec.field(default_factory=list)


@dataclass
class AdmittedPeers:
    """Every peer that was seen in one swarm, in the owner's file `NAME.members`. It is a file of its own, since running nodes of
    the owner write it while commands write the invites."""

    path: Path
    _peers: dict[tuple[str, PeerId], AdmittedPeer] = field(default_factory=dict)  # by invite and peer

    def __repr__(self) -> str:
        return f"<AdmittedPeers {self.path.name} of {len(self._peers)}>"

    def __iter__(self) -> Iterator[AdmittedPeer]:
        return iter(self._peers.values())

    def record(self, seen: Iterable[AdmittedPeer]) -> bool:
        """Add the peers `seen` now, at most `MAX_PEERS_OF_AN_INVITE` of an invite. Returns whether the file should be written;
        not if a peer was merely seen again within `SEEN_STEP_S`."""
        news = False
        counts = Counter(peer.invite for peer in self)
        for peer in seen:
            entry = self._peers.get((peer.invite, peer.peer))
            if entry is None:
                if counts[peer.invite] >= MAX_PEERS_OF_AN_INVITE or len(self._peers) >= MAX_PEERS:
                    continue
                counts[peer.invite] += 1
            else:
                # what it did not say now stays
                peer = msgspec.structs.replace(
                    peer,
                    home=peer.home or entry.home,
                    name=peer.name or entry.name,
                    joined_at=min(peer.joined_at, entry.joined_at),
                    seen_at=max(peer.seen_at, entry.seen_at),
                )
                if (
                    peer == msgspec.structs.replace(entry, seen_at=peer.seen_at)
                    and peer.seen_at - entry.seen_at < SEEN_STEP_S
                ):
                    continue
            self._peers[peer.invite, peer.peer] = peer
            news = True
        return news

    def save(self) -> None:
        """Write the file, readable by its owner alone. Raises LocalError if it cannot be written."""
        write_private(self.path, msgspec.json.encode(_MembersFile(FORMAT, list(self))))


def open_admitted_peers(swarm_file: Path) -> AdmittedPeers:
    """Read the members' file that belongs to a .swarm file: beside it. Empty if there is no file. Raises UsageError if the file
    cannot be read or is not such a list."""
    path = swarm_file.with_suffix(MEMBERS_SUFFIX)
    content = load_user_file(path, _MembersFile, max_bytes=MAX_FILE_BYTES, what=WHAT)
    peers = () if content is None else content.peers
    return AdmittedPeers(path, {(peer.invite, peer.peer): peer for peer in peers})


def record_members(swarm_file: Path, seen: Iterable[AdmittedPeer]) -> AdmittedPeers:
    """Add the peers `seen` now to the members' file beside a .swarm file, and return its content. Raises UsageError if the file
    cannot be read, LocalError if it cannot be written."""
    admitted = open_admitted_peers(swarm_file)
    if admitted.record(seen):
        admitted.save()
    return admitted


class _File(VersionedFile):
    guests: list[IssuedInvite] = msgspec.field(default_factory=list)
    revocations: bytes = b""
    shown: str = ""


@dataclass
class IssuedInvites:
    """Issued invites and revocations of one swarm. Read by `open_issued_invites`, written by `save`."""

    path: Path
    guests: list[IssuedInvite] = field(default_factory=list)
    revocations: bytes = b""  # newest revocation list as it was signed; empty before the first
    shown: str = ""  # line of the invite that `host` showed last, to be shown again; a secret

    def __repr__(self) -> str:
        return f"<IssuedInvites {self.path.name} of {len(self.guests)} invites>"

    def enter(self, grant: Grant, note: str = "") -> IssuedInvite:
        """Add a new invite to the list, and return its entry."""
        role = grant.allows.name.lower()
        times = (grant.issued_at, grant.expires_at)
        guest = IssuedInvite(grant.invite_id.hex(), role, *times, grant.uses, grant.peer, grant.group, note)
        self.guests.append(guest)
        return guest

    def save(self) -> None:
        """Write the file, readable by its owner alone. Raises LocalError if it cannot be written."""
        write_private(self.path, msgspec.json.encode(_File(FORMAT, self.guests, self.revocations, self.shown)))


def issued_invites_path(swarm_file: Path) -> Path:
    """Return the path of the list that belongs to a .swarm file: beside it."""
    return swarm_file.with_suffix(SUFFIX)


def open_issued_invites(swarm_file: Path) -> IssuedInvites:
    """Read the list that belongs to a .swarm file; it is empty if there is no file. Raises UsageError if the file cannot be read or
    is not such a list."""
    path = issued_invites_path(swarm_file)
    content = load_user_file(path, _File, max_bytes=MAX_FILE_BYTES, what=WHAT) or _File(FORMAT)
    return IssuedInvites(path, content.guests, content.revocations, content.shown)
