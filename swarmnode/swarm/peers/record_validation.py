"""Validation of records in the DHT: announcements, reports, shared adapters and notices, each under its key, not too
long-lived, by its author.

The module also defines keys and subkeys of reports and adapters, which limit the records of one author.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import PeerId, Record, RecordValidator, key_digest
from swarmnode.swarm.peers.notices import LIFE_S as NOTICE_LIFE_S
from swarmnode.swarm.peers.notices import REVOCATIONS, USE, notice_keys, use_subkey
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
from swarmnode.swarm.records.certificate import open_certificate
from swarmnode.swarm.records.membership import Membership
from swarmnode.swarm.records.report import Report, open_report
from swarmnode.swarm.records.signed import Verify
from swarmnode.swarm.records.statement import Statement

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
        try:
            yield open_report(record.value, swarm, verify)
        except ProtocolError:
            continue  # the DHT's own validation refuses it


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
        try:
            adapter = open_adapter(record.value, swarm, verify)
            adapter.check_times(now)
        except ProtocolError:
            continue  # the DHT's own validation refuses it
        yield adapter, record.value


def record_validator(
    swarm: bytes, verify: Verify, now: Now, *, membership: Membership | None = None
) -> RecordValidator:
    """Return the validator of a swarm's records. `membership` is that of a swarm with an owner."""
    reports = {REPORT: report_rule(swarm, verify, now), ADAPTER: adapter_rule(swarm, verify, now)}
    if membership is None:
        return by_subkey({**reports, b"": announcement_rule(swarm, verify, now)})
    vouched = announcement_rule(swarm, verify, now, partial(_vouch, membership, now))
    return by_subkey({**reports, **notice_rules(membership, now), b"": vouched})


def _vouch(membership: Membership, now: Now, announcement: Announcement, certificate: bytes) -> None:
    membership.vouch(announcement, certificate, now())


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


def report_rule(swarm: bytes, verify: Verify, now: Now) -> RecordValidator:
    """Return the rule of reports: all of a swarm under one key, few of one author, each for an hour."""
    reports = key_digest(report_key(swarm))

    def valid(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        report, _ = open_report(value, swarm, verify)
        in_time = report.at <= now() + MAX_SKEW_S and expires_at <= report.at + LIFE_S
        return key == reports and subkey == report_subkey(report.author, report.accused) and in_time

    return valid


def adapter_rule(swarm: bytes, verify: Verify, now: Now) -> RecordValidator:
    """Return the rule of shared adapters: all of a swarm under one key, SLOTS of one owner, each for LISTED_S."""
    adapters = key_digest(adapters_key(swarm))

    def valid(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        record = open_adapter(value, swarm, verify)
        record.check_times(now())
        in_time = expires_at <= min(record.expires_at, now() + LISTED_S + MAX_SKEW_S)
        return key == adapters and subkey == adapter_subkey(record) and record.allows is not Share.PRIVATE and in_time

    return valid


def notice_rules(membership: Membership, now: Now) -> dict[bytes, RecordValidator]:
    """Return the rules of notices. They also teach `membership` newer revocation lists and uses of invites."""
    revocations_key, uses_key = map(key_digest, notice_keys(membership.swarm))

    def is_list(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        if key != revocations_key or subkey != REVOCATIONS or expires_at > now() + NOTICE_LIFE_S + MAX_SKEW_S:
            return False
        membership.take_list(value)
        return value == membership.revocations_bytes

    def is_use(key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        if key != uses_key or expires_at > now() + NOTICE_LIFE_S + MAX_SKEW_S:
            return False
        member = open_certificate(value, membership.swarm, membership.owner)
        return subkey == use_subkey(member) and membership.note_use(value, now())

    return {REVOCATIONS: is_list, USE: is_use}
