"""Adapters' records and the tickets of sessions: what is signed, for whom it is good, and for how long."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import AdapterTicket, Mode, Open
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import key_digest
from swarmnode.swarm.peers.record_validation import LISTED_S, adapter_subkey, adapters_key, record_validator
from swarmnode.swarm.records.adapter_record import (
    DAY_S,
    TICKET_S,
    AdapterRecord,
    Share,
    admitted_record,
    open_adapter,
    sign_adapter,
    signed_ticket,
)

SWARM, NOW = bytes(range(32)), 1_800_000_000
OWNER, THIEF = Identity(b"o" * 32), Identity(b"t" * 32)
RECORD = AdapterRecord(
    SWARM, OWNER.peer_id, "verse", Share.PRIVATE, 4, 300, b"c" * 32, 5000, b"w" * 32, NOW, NOW + DAY_S
)
SHARED = msgspec.structs.replace(RECORD, share=Share.MEMBERS)
OPENED = Open(b"s" * 16, 1, (HopSpec("a", 0, 3), HopSpec("b", 3, 6)), 0, Mode.DRIVEN, 1, 8, adapter=RECORD.id)


def opened_with(record: AdapterRecord = RECORD, key: Identity = OWNER, opened: Open = OPENED) -> Open:
    raw = sign_adapter(record, OWNER.sign)
    is_private = record.allows is Share.PRIVATE
    ticket = signed_ticket(opened, raw, record, key.sign, "me", NOW) if is_private else AdapterTicket(raw)
    return msgspec.structs.replace(opened, ticket=ticket)


def refusal(opened: Open, *, sender: str = "me", now: float = NOW) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught:
        admitted_record(opened, sender, SWARM, verify, now)
    return caught.value.code


def test_a_ticket_is_good_for_its_session_on_each_hop_of_its_route() -> None:
    opened = opened_with()
    for index, sender in enumerate(("me", "a")):
        at_hop = msgspec.structs.replace(opened, index=index)
        assert admitted_record(at_hop, sender, SWARM, verify, NOW + TICKET_S) == RECORD
    assert refusal(opened, sender="b") == ErrorCode.ADAPTER_PRIVATE, "a hop that begins as the client did"
    assert admitted_record(opened_with(SHARED, THIEF), "b", SWARM, verify, NOW) == SHARED


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda opened: {"ticket": None}, ErrorCode.INVALID_REQUEST),
        (lambda opened: {"adapter": "0" * 64}, ErrorCode.INVALID_REQUEST),
        (lambda opened: {"session": b"t" * 16}, ErrorCode.ADAPTER_PRIVATE),
        (lambda opened: {"epoch": 2}, ErrorCode.ADAPTER_PRIVATE),
        (lambda opened: {"route": (HopSpec("a", 0, 6),)}, ErrorCode.ADAPTER_PRIVATE),
        (lambda opened: {"ticket": AdapterTicket(opened.ticket.record)}, ErrorCode.ADAPTER_PRIVATE),
        (
            lambda opened: {"ticket": msgspec.structs.replace(opened.ticket, at=opened.ticket.at + 1)},
            ErrorCode.ADAPTER_PRIVATE,
        ),
        (lambda opened: {"ticket": AdapterTicket(opened.ticket.record[:-1] + b"!")}, ErrorCode.REFUSED),
        (lambda opened: {"ticket": AdapterTicket(b"!")}, ErrorCode.MALFORMED),
    ],
)
def test_it_is_good_for_nothing_else(change: Callable[[Open], dict[str, object]], code: ErrorCode) -> None:
    opened = opened_with()
    assert refusal(msgspec.structs.replace(opened, **change(opened))) == code


def test_times_and_owners_are_checked() -> None:
    assert refusal(opened_with(), now=NOW + TICKET_S + 2) == ErrorCode.ADAPTER_PRIVATE
    assert refusal(opened_with(), now=NOW + DAY_S) == ErrorCode.ADAPTER_EXPIRED
    assert refusal(opened_with(), now=NOW - DAY_S) == ErrorCode.MALFORMED
    assert refusal(opened_with(key=THIEF)) == ErrorCode.ADAPTER_PRIVATE
    with pytest.raises(ProtocolError, match="another swarm"):
        open_adapter(sign_adapter(RECORD, OWNER.sign), bytes(32), verify)


def test_the_id_is_of_owner_and_files_alone() -> None:
    renamed = msgspec.structs.replace(SHARED, name="rhyme", issued_at=NOW + 1, expires_at=NOW + 9, slot=3)
    assert renamed.id == RECORD.id
    others = {"owner": THIEF.peer_id}, {"weights_root": b"v" * 32}, {"config_size": 301}, {"swarm": bytes(32)}
    assert RECORD.id not in {msgspec.structs.replace(RECORD, **change).id for change in others}
    assert msgspec.structs.replace(RECORD, share=9).allows is Share.PRIVATE


def test_the_table_keeps_what_is_shared_where_it_belongs() -> None:
    valid = record_validator(SWARM, verify, lambda: float(NOW))
    key, subkey, until = key_digest(adapters_key(SWARM)), adapter_subkey(SHARED), NOW + LISTED_S
    good = sign_adapter(SHARED, OWNER.sign)
    assert valid(key, subkey, good, until)
    assert not valid(key, subkey, sign_adapter(RECORD, OWNER.sign), until), "it is private"
    assert not valid(key_digest(b"elsewhere"), subkey, good, until)
    assert not valid(key, subkey + b"2", good, until)
    assert not valid(key, subkey, sign_adapter(SHARED, THIEF.sign), until)
    assert not valid(key, subkey, good, until + DAY_S), "longer than any list needs it"
    over = msgspec.structs.replace(SHARED, issued_at=NOW - 9, expires_at=NOW - 1)
    assert not valid(key, subkey, sign_adapter(over, OWNER.sign), NOW - 1)
