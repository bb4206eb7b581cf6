import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.addressing.reachability import Reachability
from swarmnode.swarm.records.announcement import (
    COORDINATE_NUMBERS,
    DOMAIN,
    MAX_ADDRESS_CHARS,
    MAX_ADDRESSES,
    MAX_CODEC,
    MAX_CODECS,
    MAX_COORDINATE,
    MAX_DEVICE_CHARS,
    MAX_NAME_CHARS,
    MAX_PATHS,
    MAX_PEER_CHARS,
    MAX_RECORD_BYTES,
    MAX_RTTS,
    MAX_UNIT_TIMES,
    VERSION,
    Announcement,
    State,
    announcement_reader,
    fit,
    open_announcement,
    peer_digest,
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


def fullest(**changes):
    """Every field at its limit, texts in characters of four bytes."""
    limits = {
        "peer": "x" * MAX_PEER_CHARS,
        "sequence": 2**63 - 1,
        "state": State.DRAINING,
        "span": (4000, 4096),
        "seeds": (4000, 4096),
        "name": "\U0001f600" * MAX_NAME_CHARS,
        "device": "\U0001f600" * MAX_DEVICE_CHARS,
        "cache_tokens_free": 2**63 - 1,
        "memory_bytes": 2**63 - 1,
        "sessions": 2**63 - 1,
        "codecs": (255,) * MAX_CODECS,
        "addresses": ("/" + "a" * (MAX_ADDRESS_CHARS - 1),) * MAX_ADDRESSES,
        "rtt_us": {peer_digest(str(i)): 2**32 - 1 for i in range(MAX_RTTS)},
        "training_step": 2**63 - 1,
        "sends": {peer_digest(str(i)): MAX_CODEC for i in range(MAX_RTTS)},
        "coordinate": (MAX_COORDINATE,) * COORDINATE_NUMBERS,
        "reachability": Reachability.RELAYED,
        "unit_us": {peer_digest(str(i)): 2**32 - 1 for i in range(MAX_UNIT_TIMES)},
        "backup_bytes": 2**63 - 1,
        "path_kbps": {peer_digest(str(i)): 2**32 - 1 for i in range(MAX_PATHS)},
        "step_load": (2**32 - 1,) * 3,
    }
    return make(**{**limits, **changes})


def test_the_fullest_announcement_fits_once_its_least_useful_entries_are_left_out():
    with pytest.raises(ValueError, match="the bound is 1024"):
        record(fullest())
    fitted = fit(fullest())
    assert len(record(fitted)) <= MAX_RECORD_BYTES
    assert fitted == fullest(rtt_us={}, path_kbps={}, sends={}, unit_us={}, addresses=fitted.addresses), (
        "nothing else was touched"
    )


def test_what_a_home_machine_has_to_say_fits_as_it_is():
    usual = make(
        peer="12D3KooW" + "x" * 44,
        sequence=1_790_000_000_000,
        span=(100, 140),
        seeds=(100, 140),
        name="the box under the desk",
        device="NVIDIA GeForce RTX 4090 Laptop GPU",
        decode_units_per_s=1234.5,
        memory_bytes=10**12,
        codecs=(0, 1, 2, 3, 4, 5),
        addresses=("/ip4/192.168.178.101/tcp/40123", "/ip6/2001:db8:85a3::8a2e:370:7334/tcp/40123"),
        rtt_us={peer_digest(str(i)): 250_000 for i in range(MAX_RTTS)},
        sends={peer_digest(str(i)): 3 for i in range(4)},
        path_kbps={peer_digest(str(i)): 940_000 for i in range(MAX_PATHS)},
        coordinate=(-1200, 800, 341, 55, 12),
        reachability=Reachability.MAPPED,
    )
    assert fit(usual) is usual
    assert len(record(usual)) < 920


def test_round_trips_go_before_the_codecs_of_links_and_those_before_addresses():
    shorter = fit(fullest(device="", name=""))
    assert len(record(shorter)) > MAX_RECORD_BYTES - 16, "no more is left out than must be"
    assert (len(shorter.addresses), shorter.rtt_us, shorter.path_kbps) == (MAX_ADDRESSES, {}, {})
    assert 0 < len(shorter.sends) < MAX_RTTS


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
        {"training_units_per_s": -1.0},
        {"coordinate": (1, 2, 3)},
        {"coordinate": (1, 2, 3, -4, 5)},
        {"coordinate": (1 << 30, 2, 3, 4, 5)},
        {"reachability": -1},
        {"unit_us": {bytes(8): -1}},
        {"path_kbps": {bytes(7): 1}},
        {"path_kbps": {bytes(8): 1 << 32}},
        {"path_kbps": {peer_digest(str(i)): 1 for i in range(MAX_PATHS + 1)}},
        {"parallel_speedup": 0.5},
        {"parallel_speedup": 17.0},
        {"parallel_speedup": float("nan")},
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
    assert make(reachability=9).reach is Reachability.UNKNOWN


@given(st.binary(max_size=300))
def test_garbage(data):
    with pytest.raises(ProtocolError):
        open_announcement(data, SWARM, fake_verify)


def test_a_signature_is_checked_once():
    checks = []

    def verify(*parts):
        checks.append(parts)
        return fake_verify(*parts)

    read, keep = announcement_reader(SWARM, verify), announcement_reader(SWARM, verify)
    good = record(make())
    bad = good[:-1] + bytes([good[-1] ^ 1])
    assert read(good) is read(good) is keep(good), "the same record is kept for others and read"
    assert len(checks) == 1
    for _ in range(2):
        with pytest.raises(ProtocolError):
            read(bad)
