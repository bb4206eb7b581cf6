"""Peer ids as bytes, which strangers send."""

from __future__ import annotations

import base58
import pytest

from swarmnode.net.identity import Identity
from swarmnode.net.libp2p.p2pd_control import peer_bytes, peer_name
from tests.swarm.society import ALICE

RSA = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"  # libp2p specs, "Peer Ids and Keys"
SECP256K1 = "16Uiu2HAmLhLvBoYaoZfaMUKuibM6ac163GwKY74c5kiSLg5KvLpY"


@pytest.mark.parametrize(
    "peer", [ALICE, Identity.generate().peer_id, RSA, SECP256K1], ids=["alice", "new", "rsa", "secp256k1"]
)
def test_ids_there_and_back(peer: str) -> None:
    assert peer_name(base58.b58decode(peer)) == peer
    assert peer_name(peer_bytes(peer)) == peer


KEY = base58.b58decode(ALICE)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\0",
        b"\0\0",
        b"peer",
        bytes(64),
        KEY[:-1],
        KEY + b"\0",
        b"\0\x23" + KEY[2:],
        b"\0\x2b" + bytes(43),
        b"\x12\x20" + bytes(31),
        b"\x12\x20" + bytes(33),
        b"\x13\x40" + bytes(64),
        b"\x12" + bytes(33),
        bytes(1 << 20),
    ],
    ids=lambda raw: f"{raw[:3].hex()}, {len(raw)} bytes",
)
def test_other_bytes_are_no_id(raw: bytes) -> None:
    assert peer_name(raw) == ""
