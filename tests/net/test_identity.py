from __future__ import annotations

import itertools
import stat
import subprocess
from pathlib import Path

import pytest

from swarmnode.errors import LocalError
from swarmnode.net.identity import Identity, verify
from swarmnode.net.libp2p.from_hivemind import P2PD


def test_a_new_identity_is_kept_in_a_private_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peer.key"
    identity = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert Identity.load_or_create(path).peer_id == identity.peer_id
    assert repr(identity) == f"<Identity {identity.peer_id}>"


def test_libp2p_reads_the_file_and_finds_the_same_peer_id(tmp_path: Path) -> None:
    path = tmp_path / "peer.key"
    identity = Identity.load_or_create(path)
    command = [P2PD, f"-id={path}", f"-listen=/unix{tmp_path}/p2pd.sock", "-noListenAddrs", "-idleTimeout=1ms"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as p2pd:
        assert p2pd.stdout is not None
        try:
            assert f"Peer ID: {identity.peer_id}\n" in itertools.islice(p2pd.stdout, 2)
        finally:
            p2pd.kill()


@pytest.mark.parametrize("data", [b"", b"\x08\x01\x12\x40short", b"\x08\x00\x12\x40" + bytes(64)])
def test_what_is_no_identity_is_refused_and_kept(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "peer.key"
    path.write_bytes(data)
    with pytest.raises(LocalError, match=r"peer\.key is not an identity file"):
        Identity.load_or_create(path)
    assert path.read_bytes() == data


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LocalError, match="cannot"):
        Identity.load_or_create(tmp_path / "file" / "peer.key")


def test_signatures() -> None:
    alice, bob = Identity(bytes(32)), Identity(bytes(31) + b"\x01")
    signature = alice.sign(b"data")
    assert verify(alice.peer_id, b"data", signature)
    assert not verify(bob.peer_id, b"data", signature)
    assert not verify(alice.peer_id, b"Data", signature)
    assert not verify(alice.peer_id, b"data", signature[:-1])
    assert not verify(alice.peer_id, b"data", b"")


@pytest.mark.parametrize("peer", ["", "0OIl", "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "12D3Koo", "é"])
def test_peer_ids_without_an_ed25519_key_sign_nothing(peer: str) -> None:
    assert not verify(peer, b"data", bytes(64))


def test_an_identity_survives_its_bytes() -> None:
    identity = Identity(bytes(range(32)))
    assert identity.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
    assert Identity.from_bytes(identity.to_bytes()).peer_id == identity.peer_id
