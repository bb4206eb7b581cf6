"""Identities: Ed25519 keys in the file format that p2pd reads, their peer ids, and signatures.

The id of an Ed25519 peer holds its public key (identity multihash, libp2p specs "Peer Ids and Keys"), so signatures can be checked
with the id alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, TypeVar

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from swarmnode.errors import LocalError, with_advice
from swarmnode.files import existing, lock_alone, make_private, may_write, write_private
from swarmnode.net.interfaces import PeerId

SEED_BYTES = 32  # any 32 bytes are a private key (RFC 8032, section 5.1.5)
HOSTED = "hosted"  # folder of locks in a home
MAX_SLOTS = 64  # identities of one role in one home
REMEMBERED_SIGNATURES = 1024

# protobuf: field 1 (type) varint 1 = Ed25519; field 2 (data), length
_PRIVATE_HEAD = bytes([0x08, 0x01, 0x12, 0x40])
_PUBLIC_HEAD = bytes([0x08, 0x01, 0x12, 0x20])
_MULTIHASH_HEAD = bytes([0x00, 0x24])  # identity hash of 36 bytes

Key = TypeVar("Key", bound="SigningKey")


def check_home(home: Path) -> None:
    """Raise LocalError if a node cannot keep its state in `home`. Creates nothing."""
    place = existing(home)
    if not place.is_dir() or not may_write(place):
        raise LocalError(f"cannot keep state in {home}: {place} is no writable folder; choose another --home")


class IdentitySlot:
    """An identity file that no other running process uses. Several nodes may share a home: each takes the next free slot.

    Raises LocalError if `home` cannot be written or all slots are in use.
    """

    def __init__(self, home: Path, role: str) -> None:
        self._lock: IO[bytes] | None = None
        try:
            make_private(home)
            for slot in range(1, MAX_SLOTS + 1):
                self.path = home / (f"{role}.key" if slot == 1 else f"{role}-{slot}.key")
                self._lock = lock_alone(self.path.with_suffix(".lock"))
                if self._lock is not None:
                    return
        except OSError as error:
            raise LocalError(f"cannot keep state in {home}: {with_advice(error, 'choose another --home')}") from error
        raise LocalError(f"{MAX_SLOTS} nodes already use {home}; give this one another --home")

    def release(self) -> None:
        """Release the lock, so that another process can use the identity."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def identities(home: Path, pattern: str = "*.key") -> Iterator[Identity]:
    """Yield the identities of a home folder whose key files match `pattern`, by file name; unreadable files are skipped."""
    for path in sorted(home.glob(pattern)):
        with contextlib.suppress(OSError, LocalError):
            yield Identity.from_bytes(path.read_bytes())


@contextlib.contextmanager
def hosting_alone(home: Path, swarm_id: bytes, name: str) -> Iterator[None]:
    """Hold a swarm's lock in the home folder while the context lasts. Raises LocalError if another process hosts the swarm
    already, and names that process."""
    folder = home / HOSTED
    path = folder / f"{swarm_id.hex()[:16]}.lock"
    pid_file = path.with_suffix(".pid")
    try:
        make_private(folder)
        lock = lock_alone(path)
        if lock is None:
            pid = pid_file.read_text()
            raise LocalError(f"{name} is hosted here already, by process {pid}: `swarmnode ps` shows it")
        pid_file.write_text(str(os.getpid()))
    except OSError as error:
        raise LocalError(f"cannot keep state in {home}: {with_advice(error, 'choose another --home')}") from error
    with lock:
        yield


class SigningKey:
    """Ed25519 key for signatures: the private and the public key."""

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.seed = seed
        self.public = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"<SigningKey {self.public.hex()[:16]}>"

    @classmethod
    def generate(cls: type[Key]) -> Key:
        """Generate a key from random bytes."""
        return cls(secrets.token_bytes(SEED_BYTES))

    def sign(self, data: bytes) -> bytes:
        """Return the 64-byte signature of `data`."""
        return self._key.sign(data)


class Identity(SigningKey):
    """A private key and its peer id."""

    def __init__(self, seed: bytes) -> None:
        super().__init__(seed)
        self.peer_id: PeerId = base58.b58encode(_MULTIHASH_HEAD + _PUBLIC_HEAD + self.public).decode()

    def __repr__(self) -> str:
        return f"<Identity {self.peer_id}>"

    @classmethod
    def from_bytes(cls, data: bytes) -> Identity:
        """Return the identity in the bytes of a libp2p key file. Raises LocalError if they are not an Ed25519 private key."""
        if len(data) != len(_PRIVATE_HEAD) + 64 or not data.startswith(_PRIVATE_HEAD):
            raise LocalError("not an Ed25519 identity key; use a key file that swarmnode wrote")
        identity = cls(data[len(_PRIVATE_HEAD) : len(_PRIVATE_HEAD) + 32])
        if identity.to_bytes() != data:  # torn by a power cut: private and public key do not match
            raise LocalError("not an Ed25519 identity key; use a key file that swarmnode wrote")
        return identity

    def to_bytes(self) -> bytes:
        """Return the identity as libp2p's private key message; a secret."""
        return _PRIVATE_HEAD + self.seed + self.public

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Return the identity in the file `path`; if there is no file, write a new one. Raises LocalError if the file is no
        identity or cannot be read or written."""
        try:
            return cls.from_bytes(path.read_bytes())
        except FileNotFoundError:
            identity = cls.generate()
            identity.save(path)
            return identity
        except LocalError:
            raise LocalError(f"{path} is not an identity file; move it away to get a new identity") from None
        except OSError as error:
            raise LocalError(f"cannot read {path}: {error.strerror or error}; check its permissions") from error

    def save(self, path: Path) -> None:
        """Write the key file with mode 0600, atomically, creating its folder if missing. Raises LocalError."""
        write_private(path, self.to_bytes(), make_folder=True)


@lru_cache(maxsize=4096)
def _public_key(peer: PeerId) -> Ed25519PublicKey | None:
    try:
        raw = base58.b58decode(peer)
    except ValueError:
        return None
    head = _MULTIHASH_HEAD + _PUBLIC_HEAD
    if len(raw) != len(head) + 32 or not raw.startswith(head):
        return None
    return Ed25519PublicKey.from_public_bytes(raw[len(head) :])


def is_peer_id(text: str) -> bool:
    """Return whether the text is the id of an Ed25519 peer."""
    return _public_key(text) is not None


@lru_cache(maxsize=REMEMBERED_SIGNATURES)
def verify(peer: PeerId, data: bytes, signature: bytes) -> bool:
    """Return whether the key of `peer` made the signature of `data`. False for ids that are not of Ed25519 keys.

    Cached: a record is checked once as one kept for others and once as one read.
    """
    key = _public_key(peer)
    return key is not None and has_signed(key, data, signature)


def has_signed(key: Ed25519PublicKey, data: bytes, signature: bytes) -> bool:
    """Return whether the key made the signature of `data`."""
    try:
        key.verify(signature, data)
    except InvalidSignature:
        return False
    return True
