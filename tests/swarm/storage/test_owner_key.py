from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from swarmnode.errors import UsageError
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.records.signed import is_signed
from swarmnode.swarm.storage.owner_files import is_locked, load_owner_key, parse_owner_key, save_owner_key
from tests.swarm.society import OWNER, STRANGER


def test_round_trip_under_a_password(tmp_path):
    path = tmp_path / "friends.owner"
    save_owner_key(OWNER, path, "secret")
    assert path.stat().st_mode & 0o777 == 0o600
    assert OWNER.seed not in path.read_bytes() and b"ENCRYPTED" in path.read_bytes()
    assert load_owner_key(path, "secret").public == OWNER.public


def test_round_trip_without_a_password(tmp_path):
    path = tmp_path / "friends.owner"
    assert not is_locked(path), "there is none"
    save_owner_key(OWNER, path, "")
    assert path.stat().st_mode & 0o777 == 0o600 and not is_locked(path)
    assert load_owner_key(path, None).public == OWNER.public
    save_owner_key(OWNER, path, "secret")
    assert is_locked(path)


def test_what_does_not_open_is_said_in_words(tmp_path):
    path = tmp_path / "friends.owner"
    save_owner_key(OWNER, path, "secret")
    with pytest.raises(UsageError, match="password is wrong"):
        load_owner_key(path, "guess")
    with pytest.raises(UsageError, match="needs a password"):
        parse_owner_key(path.read_bytes(), None, source="AGENT")
    with pytest.raises(UsageError, match="no such file"):
        load_owner_key(tmp_path / "none.owner", "secret")
    with pytest.raises(UsageError, match="does not open"):
        parse_owner_key(b"hello", None, source="AGENT")


def test_a_key_from_an_agent_needs_no_password():
    private = Ed25519PrivateKey.from_private_bytes(OWNER.seed)
    pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    assert parse_owner_key(pem, None, source="AGENT").public == OWNER.public
    other = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    with pytest.raises(UsageError, match="not an Ed25519"):
        parse_owner_key(other, None, source="AGENT")


def test_signatures():
    signature = OWNER.sign(b"word")
    assert is_signed(OWNER.public, b"word", signature)
    assert not is_signed(OWNER.public, b"words", signature)
    assert not is_signed(STRANGER.public, b"word", signature)
    assert not is_signed(b"short", b"word", signature)
    assert "SigningKey" in repr(SigningKey.generate()) and OWNER.seed.hex() not in repr(OWNER)
