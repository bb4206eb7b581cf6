"""Reports: who signed them, and what the accused signed."""

from __future__ import annotations

import msgspec
import pytest

from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.net.identity import Identity, verify
from swarmnode.net.interfaces import Record, key_digest
from swarmnode.swarm.peers.record_validation import (
    LIFE_S,
    SLOTS,
    record_validator,
    report_key,
    report_subkey,
    reports_in,
)
from swarmnode.swarm.records.statement import (
    MAX_IDS,
    MAX_REPORT_BYTES,
    Edge,
    Report,
    Statement,
    open_report,
    sign_report,
    sign_statement,
)

SWARM, OTHER = bytes(32), bytes([1] * 32)
NOW = 1e9
author, accused = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))


def stated(signer: Identity = accused, **changes: object) -> bytes:
    edge = Edge(bytes(32), 0, 20)
    statement = Statement(SWARM, signer.peer_id, bytes(16), 0, 2, "float32", 0, bytes(16), 0, 20, edge, edge, bytes(32))
    return sign_statement(msgspec.structs.replace(statement, **changes), signer.sign)


def report(**changes: object) -> Report:
    usual = Report(SWARM, author.peer_id, accused.peer_id, NOW, 16, tuple(range(24)), stated())
    return msgspec.structs.replace(usual, **changes)


def signed(**changes: object) -> bytes:
    return sign_report(report(**changes), author.sign)


def test_what_was_signed_is_read_again() -> None:
    read, statement = open_report(signed(), SWARM, verify)
    assert read == report()
    assert statement.peer == accused.peer_id


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (bytes(MAX_REPORT_BYTES + 1), ErrorCode.TOO_LARGE),
        (b"\x90", ErrorCode.MALFORMED),
        (signed(accused=author.peer_id), ErrorCode.MALFORMED),
        (signed(at=float("nan")), ErrorCode.MALFORMED),
        (signed(prompt=24), ErrorCode.MALFORMED),
        (signed(ids=tuple(range(MAX_IDS + 1))), ErrorCode.MALFORMED),
        (signed(ids=(-1,) * 24), ErrorCode.MALFORMED),
        (signed(statement=b""), ErrorCode.MALFORMED),
        (signed(swarm=OTHER), ErrorCode.WRONG_SWARM),
        (sign_report(report(), accused.sign), ErrorCode.REFUSED),
        (signed(statement=stated(author)), ErrorCode.REFUSED),
        (signed(statement=stated(count=24, received=Edge(), sent=Edge())), ErrorCode.REFUSED),
        (signed(statement=stated(swarm=OTHER)), ErrorCode.WRONG_SWARM),
    ],
)
def test_what_is_refused(raw: bytes, code: ErrorCode) -> None:
    with pytest.raises(ProtocolError) as caught:
        open_report(raw, SWARM, verify)
    assert caught.value.code is code


def test_the_table_keeps_few_of_one_author_each_in_its_place_and_for_an_hour() -> None:
    valid = record_validator(SWARM, verify, lambda: NOW)
    key, subkey, end = key_digest(report_key(SWARM)), report_subkey(author.peer_id, accused.peer_id), NOW + LIFE_S
    assert valid(key, subkey, signed(), end)
    assert not valid(key_digest(report_key(OTHER)), subkey, signed(), end)
    assert not valid(key, report_subkey(accused.peer_id, author.peer_id), signed(), end)
    assert not valid(key, subkey, signed(), end + 1)
    assert not valid(key, subkey, signed(at=NOW + 60), end), "of the future"
    assert not valid(key, subkey, sign_report(report(), accused.sign), end)
    assert not valid(key, b"another", signed(), end), "for others to say"
    assert len({report_subkey("author", f"accused {number}") for number in range(200)}) == SLOTS


def test_among_many_those_that_hold_are_read() -> None:
    records = [Record(value, NOW) for value in (b"", signed(), signed(swarm=OTHER))]
    assert [read for read, _ in reports_in(records, SWARM, verify)] == [report()]
