import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.announcement import (
    DOMAIN,
    MAX_ADDRESSES,
    MAX_RECORD_BYTES,
    MAX_RTTS,
    VERSION,
    Announcement,
    State,
    announcement_reader,
    open_announcement,
    peer_digest,
    record_validator,
    sign_announcement,
)

SWARM = bytes(range(32))
NOW = 1_790_000_000.0
KEY = SWARM + b":peers:0:0"


def fake_sign(peer):
    """A keyed hash in place of Ed25519: 64 bytes that only `verify` of the same peer accepts."""
    return lambda data: hashlib.sha512(peer.encode() + data).digest()


def fake_verify(peer, data, signature):
    return hashlib.sha512(peer.encode() + data).digest() == signature


def make(peer="peer-a", **changes):
    fields = {
        "version": VERSION,
        "swarm": SWARM,
        "peer": peer,
        "sequence": 1,
        "issued_at": NOW,
        "expires_at": NOW + 16,
        "started_at": NOW,
        "state": State.READY,
        "span": (0, 4),
    }
    return Announcement(**{**fields, **changes})


def record(announcement):
    return sign_announcement(announcement, fake_sign(announcement.peer))


def test_round_trip():
    announcement = make(rtt_us={peer_digest("b"): 1500}, addresses=("/ip4/127.0.0.1/tcp/1",), name="box")
    assert open_announcement(record(announcement), SWARM, fake_verify) == announcement
    assert announcement.life is State.READY
    assert announcement.holds(3) and not announcement.holds(4)
    assert repr(announcement) == "<Announcement box READY [0:4) #1>"


def test_fullest_announcement_fits():
    big = make(
        peer="12D3KooW" + "x" * 44,
        sequence=1_790_000_000_000,
        span=(100, 4000),
        seeds=(100, 4000),
        name="n" * 32,
        device="NVIDIA GeForce RTX 4090 Laptop GPU 16 GiB, bf16",
        decode_units_per_s=1234.5,
        prefill_units_per_s=123456.7,
        cache_tokens_free=10**7,
        memory_bytes=10**12,
        up_bps=1e9,
        down_bps=1e9,
        sessions=200,
        codecs=(0, 1, 2, 3, 4, 5),
        addresses=tuple(
            f"/ip6/2001:0db8:85a3:0000:0000:8a2e:0370:733{i}/udp/65535/quic-v1" for i in range(MAX_ADDRESSES)
        ),
        rtt_us={peer_digest(str(i)): 250_000 for i in range(MAX_RTTS)},
    )
    assert len(record(big)) <= MAX_RECORD_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"span": (4, 2)},
        {"span": (0, 5000)},
        {"seeds": (-1, 2)},
        {"name": "x" * 33},
        {"name": "\x1b[31m"},
        {"peer": ""},
        {"expires_at": NOW},
        {"expires_at": NOW + 1e6},
        {"decode_units_per_s": float("nan")},
        {"prefill_units_per_s": -1.0},
        {"up_bps": float("inf")},
        {"sessions": -1},
        {"addresses": ("/a",) * 5},
        {"addresses": ("127.0.0.1",)},
        {"codecs": (0,) * 17},
        {"rtt_us": {b"short": 1}},
        {"version": 0},
    ],
)
def test_bad_fields(changes):
    bad = make(**changes)
    with pytest.raises(ValueError):
        record(bad)
    body = msgspec.msgpack.encode(bad)
    forged = msgspec.msgpack.encode([body, fake_sign(bad.peer)(DOMAIN + body)])
    with pytest.raises(ProtocolError, match="bad announcement"):
        open_announcement(forged, SWARM, fake_verify)


def test_foreign_forged_and_moved_records():
    with pytest.raises(ProtocolError) as caught:
        open_announcement(sign_announcement(make(), fake_sign("mallory")), SWARM, fake_verify)
    assert caught.value.code == ErrorCode.REFUSED
    with pytest.raises(ProtocolError) as caught:
        open_announcement(record(make()), bytes(32), fake_verify)
    assert caught.value.code == ErrorCode.WRONG_SWARM
    with pytest.raises(ProtocolError) as caught:
        open_announcement(bytes(MAX_RECORD_BYTES + 1), SWARM, fake_verify)
    assert caught.value.code == ErrorCode.TOO_LARGE


def test_newer_versions_append_fields_and_states():
    fields = [*msgspec.msgpack.decode(msgspec.msgpack.encode(make(state=9))), "a new field"]
    fields[0] = 2
    body = msgspec.msgpack.encode(fields)
    newer = open_announcement(msgspec.msgpack.encode([body, fake_sign("peer-a")(DOMAIN + body)]), SWARM, fake_verify)
    assert newer.life is State.OFFLINE


def test_validator():
    valid = record_validator(SWARM, fake_verify, lambda: NOW)
    good = record(make())
    assert valid(KEY, b"peer-a", good, NOW + 16)
    assert valid(bytes(20), b"peer-a", good, NOW + 16), (
        "engines hand keys over hashed: the signed value names the swarm"
    )
    assert not valid(KEY, b"peer-b", good, NOW + 16), "another peer's subkey"
    assert not valid(KEY, b"peer-a", good, NOW + 17), "kept longer than its author wanted"
    assert not valid(KEY, b"peer-a", good[:-1] + bytes([good[-1] ^ 1]), NOW + 16), "damaged signature"
    assert not valid(KEY, b"peer-a", bytes(2000), NOW + 16), "too large"
    ahead = make(issued_at=NOW + 1000, expires_at=NOW + 1016)
    assert not valid(KEY, b"peer-a", record(ahead), NOW + 1016), "from a far future"


@given(st.binary(max_size=300))
def test_garbage(data):
    with pytest.raises(ProtocolError):
        open_announcement(data, SWARM, fake_verify)


def test_a_signature_is_checked_once():
    checks = []
    read = announcement_reader(SWARM, lambda *parts: checks.append(parts) or fake_verify(*parts))
    good, bad = record(make()), record(make())[:-1] + b"?"
    assert read(good) is read(good)
    assert len(checks) == 1
    for _ in range(2):
        with pytest.raises(ProtocolError):
            read(bad)
