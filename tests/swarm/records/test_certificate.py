from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.body import MAX_PROOF_BYTES
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.swarm.records.announcement import MAX_CERTIFICATE_BYTES
from swarmnode.swarm.records.invite import (
    MAX_GROUP_CHARS,
    MAX_USES,
    Certificate,
    Grant,
    Role,
    open_certificate,
    open_grant,
    sign_grant,
)
from tests.swarm.society import ALICE, ANOTHER_HOME, BOB, HOME, NOW, OWNER, STRANGER, SWARM, Ticket


def opened(raw: bytes):
    return open_certificate(raw, SWARM, OWNER.public)


def test_what_an_invite_admits_to():
    ticket = Ticket(role=Role.CLIENT, uses=3, group="berlin")
    member = opened(ticket.certificate(ALICE))
    assert (member.peer, member.role, member.uses, member.group) == (ALICE, Role.CLIENT, 3, "berlin")
    assert member.invite == ticket.id and member.admitted_at == NOW
    assert not member.expired(NOW) and member.expired(ticket.value.expires_at)
    assert not opened(Ticket(expires_at=0).certificate(ALICE)).expired(NOW * 2)


def test_the_largest_certificate_fits_into_a_greeting_and_an_announcement():
    ticket = Ticket(role=Role.TRAINER, uses=MAX_USES, peer=ALICE, group="x" * MAX_GROUP_CHARS)
    certificate = ticket.certificate(ALICE, 2**40 - 1, home=HOME)
    assert opened(certificate).home == HOME.public
    assert len(certificate) <= min(MAX_CERTIFICATE_BYTES, MAX_PROOF_BYTES)
    assert opened(certificate).peer == ALICE


@pytest.mark.parametrize(
    ("certificate", "code"),
    [
        (Ticket(owner=STRANGER).certificate(ALICE), ErrorCode.REFUSED),
        (Ticket(swarm=bytes(32)).certificate(ALICE), ErrorCode.WRONG_SWARM),
        (Ticket(peer=BOB).certificate(ALICE), ErrorCode.REFUSED),
        (bytes(MAX_CERTIFICATE_BYTES + 1), ErrorCode.TOO_LARGE),
        (b"", ErrorCode.MALFORMED),
    ],
    ids=["another owner", "another swarm", "another peer's invite", "too large", "nothing"],
)
def test_refused(certificate: bytes, code: ErrorCode):
    with pytest.raises(ProtocolError) as caught:
        opened(certificate)
    assert caught.value.code is code


def test_a_certificate_cannot_be_moved_to_another_peer_or_time_nor_its_grant_be_bettered():
    certificate = msgspec.msgpack.decode(Ticket(role=Role.CLIENT).certificate(ALICE), type=Certificate)
    body, signature = msgspec.msgpack.decode(certificate.grant)
    better = msgspec.structs.replace(msgspec.msgpack.decode(body, type=Grant), role=Role.TRAINER)
    raised = msgspec.msgpack.encode([msgspec.msgpack.encode(better), signature])
    for change in ({"peer": BOB}, {"admitted_at": int(NOW) - 1}, {"grant": raised}, {"home": HOME.public}):
        with pytest.raises(ProtocolError) as caught:
            opened(msgspec.msgpack.encode(msgspec.structs.replace(certificate, **change)))
        assert caught.value.code is ErrorCode.REFUSED


def test_a_home_countersigns_one_admission():
    """A friend's home cannot be named by another holder of the invite, nor be moved to another peer, time, invite or swarm."""
    ours = msgspec.msgpack.decode(Ticket().certificate(ALICE, home=HOME), type=Certificate)
    assert opened(msgspec.msgpack.encode(ours)).home == HOME.public
    for others in (
        Ticket().certificate(BOB),
        Ticket().certificate(ALICE, NOW - 1),
        Ticket("another").certificate(ALICE),
    ):
        bare = msgspec.msgpack.decode(others, type=Certificate)
        moved = msgspec.structs.replace(bare, home=ours.home, home_signature=ours.home_signature)
        with pytest.raises(ProtocolError, match="home") as caught:
            opened(msgspec.msgpack.encode(moved))
        assert caught.value.code is ErrorCode.REFUSED
    for home in (b"short", bytes(33), ANOTHER_HOME.public):
        with pytest.raises(ProtocolError):
            opened(msgspec.msgpack.encode(msgspec.structs.replace(ours, home=home)))


class OlderCertificate(msgspec.Struct, array_like=True, frozen=True):
    """As a version that knows no homes reads it."""

    grant: bytes
    peer: str
    admitted_at: int
    signature: bytes


def test_an_older_version_reads_a_certificate_with_a_home_and_this_one_reads_an_older_one():
    ticket = Ticket(uses=1)
    with_home, without = ticket.certificate(ALICE, home=HOME), ticket.certificate(ALICE)
    read = msgspec.msgpack.decode(with_home, type=OlderCertificate)
    assert read == msgspec.msgpack.decode(without, type=OlderCertificate), "the same admission, with the same signature"
    member = opened(msgspec.msgpack.encode(read))
    assert not member.home and member.user == ALICE.encode() and opened(with_home).user == HOME.public


def test_a_home_is_left_out_where_a_newer_grant_leaves_no_room():
    body = msgspec.msgpack.encode(Ticket().value)
    fields = [*msgspec.msgpack.decode(body), "x" * 150]
    newer = msgspec.msgpack.encode([2, *fields[1:]])
    ticket = Ticket()
    ticket.grant = msgspec.msgpack.encode([newer, OWNER.sign(b"swarmnode grant 1\n" + newer)])
    certificate = ticket.certificate(ALICE, home=HOME)
    assert opened(certificate).peer == ALICE and not opened(certificate).home


@given(st.data())
def test_no_bit_may_be_turned(data):
    certificate = bytearray(Ticket().certificate(ALICE, home=data.draw(st.sampled_from([None, HOME]))))
    certificate[data.draw(st.integers(0, len(certificate) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolError):
        opened(bytes(certificate))


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_in_order(raw: bytes):
    with pytest.raises(ProtocolError):
        opened(raw)


def test_a_role_of_a_newer_version_may_only_ask():
    assert opened(Ticket(role=9).certificate(ALICE)).role is Role.CLIENT


@pytest.mark.parametrize(
    "change", [{"uses": -1}, {"uses": MAX_USES + 1}, {"expires_at": 5}, {"group": "a\nb"}, {"key": b"k"}, {"role": 256}]
)
def test_a_grant_out_of_bounds_is_neither_signed_nor_read(change):
    bad = msgspec.structs.replace(Ticket().value, **change)
    with pytest.raises(ValueError, match="grant not valid"):
        sign_grant(bad, OWNER)
    body = msgspec.msgpack.encode(bad)
    with pytest.raises(ProtocolError, match="bad grant"):
        open_grant(msgspec.msgpack.encode([body, OWNER.sign(b"swarmnode grant 1\n" + body)]), SWARM, OWNER.public)


def test_a_newer_grant_may_have_more_fields():
    fields = [*msgspec.msgpack.decode(msgspec.msgpack.encode(Ticket().value)), "more"]
    body = msgspec.msgpack.encode([2, *fields[1:]])
    raw = msgspec.msgpack.encode([body, OWNER.sign(b"swarmnode grant 1\n" + body)])
    assert open_grant(raw, SWARM, OWNER.public).key == Ticket().value.key
