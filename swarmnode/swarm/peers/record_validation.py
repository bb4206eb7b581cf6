"""Validation of records in the DHT: announcements, reports, shared adapters and notices, each under its key, not too
long-lived, by its author.

The module also defines keys and subkeys of reports and adapters, which limit the records of one author.

Notices: records that members keep alive in the DHT, so that the owner may be offline.

There are two kinds, each signed by another peer than its carriers: the owner's newest revocation list, and the
certificates of members that used a limited invite. A member that finds a notice missing or about to expire stores it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId, Record, RecordValidator, key_digest
from swarmnode.swarm.peers.shards import homes, places_of
from swarmnode.swarm.records.adapter_record import AdapterRecord, Share, open_adapter
from swarmnode.swarm.records.announcement import (
    MAX_LIFE_S,
    MAX_SKEW_S,
    Announcement,
    Vouch,
    announcement_reader,
    peer_digest,
)
from swarmnode.swarm.records.invite import Member, open_certificate
from swarmnode.swarm.records.membership import Membership
from swarmnode.swarm.records.signed import Verify
from swarmnode.swarm.records.statement import Report, Statement, open_report

NOTICE_LIFE_S = 120.0
RENEW_S = 60.0  # a notice that would expire sooner is stored again
REVOCATIONS = b"revocations"
USE = b"use:"


class Notice(NamedTuple):
    """Notice that every peer should have (revocations, used invites): its key and subkey in the DHT, and its value."""

    key: bytes
    subkey: bytes
    value: bytes


def notice_keys(swarm: bytes) -> tuple[bytes, bytes]:
    """Return the DHT keys of a swarm's notices: revocations, uses."""
    return swarm + b":revocations", swarm + b":uses"


def own_notices(membership: Membership) -> Iterator[Notice]:
    """Yield the notices that this peer knows: the revocation list and the used invites."""
    revocations_key, uses_key = notice_keys(membership.swarm)
    if membership.revocations_bytes:
        yield Notice(revocations_key, REVOCATIONS, membership.revocations_bytes)
    for use in membership.uses:
        yield Notice(uses_key, use_subkey(use.member), use.member.certificate)


def accept_notices(membership: Membership, by_key: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    """Learn from the notices found in the DHT; invalid ones are ignored. Returns whether a newer revocation list was
    among them."""
    news = False
    for records in by_key.values():
        for subkey, record in records.items():
            with suppress(ProtocolError):  # the DHT's own validation refuses it in time
                if subkey == REVOCATIONS:
                    news |= membership.adopt_list(record.value)
                elif subkey.startswith(USE):
                    membership.record_use(record.value, now)
    return news


def due(membership: Membership, by_key: Mapping[bytes, Mapping[bytes, Record]], now: float) -> list[Notice]:
    """Return the notices that the DHT lacks, holds in an older form, or will drop soon."""
    return [notice for notice in own_notices(membership) if not _is_stored(notice, by_key, now)]


def _is_stored(notice: Notice, by_key: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    record = by_key.get(notice.key, {}).get(notice.subkey)
    if record is None or record.expires_at <= now + RENEW_S:
        return False
    if notice.subkey == REVOCATIONS:
        return record.value == notice.value
    return len(record.value) >= len(notice.value)  # any certificate proves the use, but a shorter one names no home


def use_subkey(member: Member) -> bytes:
    """Return the DHT subkey of the certificate of a member that used a limited invite."""
    return USE + member.invite + b":" + member.peer.encode()


LIFE_S = 3600.0  # of a report
SLOTS = 4  # reports of one author; a second one about the same accused replaces the first
REPORT = b"report:"
ADAPTER = b"adapter:"
LISTED_S = 600.0  # longest life of a shared adapter's entry, which nodes of its owner renew

Now = Callable[[], float]
"""Function that returns unix time in seconds."""


def report_key(swarm: bytes) -> bytes:
    """Return the DHT key of all reports of a swarm."""
    return swarm + b":reports"


def report_subkey(author: PeerId, accused: PeerId) -> bytes:
    """Return the DHT subkey of an author's report about `accused`."""
    return b"%b%d:%b" % (REPORT, peer_digest(accused)[0] % SLOTS, author.encode())


def reports_in(records: Iterable[Record], swarm: bytes, verify: Verify) -> Iterator[tuple[Report, Statement]]:
    """Yield the valid reports among `records`, each with its statement."""
    for record in records:
        with suppress(ProtocolError):  # the DHT's own validation refuses it
            yield open_report(record.value, swarm, verify)


def adapters_key(swarm: bytes) -> bytes:
    """Return the DHT key of all shared adapters of a swarm."""
    return swarm + b":adapters"


def adapter_subkey(record: AdapterRecord) -> bytes:
    """Return the DHT subkey of a shared adapter's record: its owner and its slot."""
    return b"%b%d:%b" % (ADAPTER, record.slot, record.owner.encode())


def adapters_in(
    records: Iterable[Record], swarm: bytes, verify: Verify, now: float
) -> Iterator[tuple[AdapterRecord, bytes]]:
    """Yield the valid records of shared adapters among `records`, each with its signed bytes."""
    for record in records:
        with suppress(ProtocolError):  # the DHT's own validation refuses it
            adapter = open_adapter(record.value, swarm, verify)
            adapter.check_times(now)
            yield adapter, record.value


def record_validator(
    swarm: bytes, verify: Verify, now: Now, *, membership: Membership | None = None
) -> RecordValidator:
    """Return the validator of a swarm's records. `membership` is that of a swarm with an owner."""
    reports, adapters = key_digest(report_key(swarm)), key_digest(adapters_key(swarm))

    def is_report(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        """All reports of a swarm lie under one key, few of one author, each for an hour."""
        report, _ = open_report(value, swarm, verify)
        in_time = report.at <= now() + MAX_SKEW_S and expires_at <= report.at + LIFE_S
        return key == reports and subkey == report_subkey(report.author, report.accused) and in_time

    def is_adapter(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        """All shared adapters of a swarm lie under one key, SLOTS of one owner, each for LISTED_S."""
        record = open_adapter(value, swarm, verify)
        record.check_times(now())
        in_time = expires_at <= min(record.expires_at, now() + LISTED_S + MAX_SKEW_S)
        return key == adapters and subkey == adapter_subkey(record) and record.allows is not Share.PRIVATE and in_time

    def vouch(announcement: Announcement, certificate: bytes) -> None:
        if membership is not None:
            membership.vouch(announcement, certificate, now())

    notices = {} if membership is None else notice_rules(membership, now)
    announced = announcement_rule(swarm, verify, now, None if membership is None else vouch)
    return by_subkey({REPORT: is_report, ADAPTER: is_adapter, **notices, b"": announced})


def by_subkey(rules: Mapping[bytes, RecordValidator]) -> RecordValidator:
    """Return a validator that asks the first rule whose prefix matches the subkey. A ProtocolError of a rule means
    invalid."""

    def valid(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        rule = next(rule for prefix, rule in rules.items() if subkey.startswith(prefix))
        try:
            return rule(key, subkey, value, expires_at)
        except ProtocolError:
            return False

    return valid


def announcement_rule(swarm: bytes, verify: Verify, now: Now, vouch: Vouch | None = None) -> RecordValidator:
    """Return the rule of announcements: under its peer's id, with a bounded life, under a key of its peer.

    A valid record is refused under any other key: else one record could fill the DHT. A peer has at most about a
    hundred keys.
    """
    read = announcement_reader(swarm, verify, vouch)

    def valid(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        announcement = read(value)
        places = (*places_of(announcement.span), *(places_of(announcement.left) if any(announcement.left) else ()))
        return (
            announcement.peer.encode() == subkey
            and expires_at <= announcement.expires_at + 1e-3
            and expires_at <= now() + MAX_LIFE_S + MAX_SKEW_S
            and key in homes(swarm, announcement.peer, places)
        )

    return valid


def notice_rules(membership: Membership, now: Now) -> dict[bytes, RecordValidator]:
    """Return the rules of notices. They also teach `membership` newer revocation lists and uses of invites."""
    revocations_key, uses_key = map(key_digest, notice_keys(membership.swarm))

    def is_list(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        if key != revocations_key or subkey != REVOCATIONS or expires_at > now() + NOTICE_LIFE_S + MAX_SKEW_S:
            return False
        membership.adopt_list(value)
        return value == membership.revocations_bytes

    def is_use(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        if key != uses_key or expires_at > now() + NOTICE_LIFE_S + MAX_SKEW_S:
            return False
        member = open_certificate(value, membership.swarm, membership.owner)
        return subkey == use_subkey(member) and membership.record_use(value, now())

    return {REVOCATIONS: is_list, USE: is_use}
