"""Notices: records that members keep alive in the DHT, so that the owner may be offline.

There are two kinds, each signed by another peer than its carriers: the owner's newest revocation list, and the
certificates of members that used a limited invite. A member that finds a notice missing or about to expire stores it
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Record
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.membership import Membership

LIFE_S = 120.0
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


def take_in(membership: Membership, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    """Learn from the notices found in the DHT; invalid ones are ignored. Returns whether a newer revocation list was
    among them."""
    news = False
    for records in found.values():
        for subkey, record in records.items():
            try:
                if subkey == REVOCATIONS:
                    news |= membership.take_list(record.value)
                elif subkey.startswith(USE):
                    membership.note_use(record.value, now)
            except ProtocolError:
                continue  # the DHT's own validation refuses it in time
    return news


def due(membership: Membership, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> list[Notice]:
    """Return the notices that the DHT lacks, holds in an older form, or will drop soon."""
    return [notice for notice in own_notices(membership) if not _is_kept(notice, found, now)]


def _is_kept(notice: Notice, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    record = found.get(notice.key, {}).get(notice.subkey)
    if record is None or record.expires_at <= now + RENEW_S:
        return False
    if notice.subkey == REVOCATIONS:
        return record.value == notice.value
    return len(record.value) >= len(notice.value)  # any certificate proves the use, but a shorter one names no home


def use_subkey(member: Member) -> bytes:
    """Return the DHT subkey of the certificate of a member that used a limited invite."""
    return USE + member.invite + b":" + member.peer.encode()
