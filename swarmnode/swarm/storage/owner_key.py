"""The owner's key on disk: PKCS #8 in PEM (RFC 5958), encrypted with the owner's password, if there is one (PBES2, RFC 8018)."""

from __future__ import annotations

from pathlib import Path

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
from swarmnode.swarm.storage.small_files import read_user_file

SUFFIX = ".owner"
MAX_FILE_BYTES = 1 << 14
LOCKED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"  # RFC 7468


def save_owner_key(key: SigningKey, path: Path, password: str) -> None:
    """Write the key atomically, readable by its owner alone, and encrypted unless the password is empty. Raises LocalError if the
    file cannot be written."""
    private = Ed25519PrivateKey.from_private_bytes(key.seed)
    lock: KeySerializationEncryption = BestAvailableEncryption(password.encode()) if password else NoEncryption()
    write_private(path, private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, lock))


def is_locked(path: Path) -> bool:
    """Return whether the key in a file is encrypted; False if there is no such file. Raises UsageError if it cannot be read."""
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what="an owner's key")
    return data is not None and LOCKED in data


def load_owner_key(path: Path, password: str | None) -> SigningKey:
    """Load the key from a file. The password of one that is not encrypted does not count.

    Raises UsageError if there is no such file, the password does not fit, or it is not an Ed25519 key.
    """
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what="an owner's key")
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
