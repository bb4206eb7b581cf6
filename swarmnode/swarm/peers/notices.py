"""Notices: what members keep alive for one another in the table, so that the owner may be offline.

Two kinds, both signed by others than their carriers: the owner's newest revocation list, and the certificates of those who
used an invite that only so many may use. Whoever finds one missing, or about to end, stores it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Record
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.membership import Membership

LIFE_S = 120.0
RENEW_S = 60.0  # a notice that would end sooner is stored again
REVOCATIONS = b"revocations"
USE = b"use:"


class Notice(NamedTuple):
    """Where in the table it lies, and what it says."""

    key: bytes
    subkey: bytes
    value: bytes


def notice_keys(swarm: bytes) -> tuple[bytes, bytes]:
    """The keys under which a swarm's notices lie: revocations, uses."""
    return swarm + b":revocations", swarm + b":uses"


def own_notices(membership: Membership) -> Iterator[Notice]:
    """What this peer knows."""
    revocations_key, uses_key = notice_keys(membership.swarm)
    if membership.revocations_bytes:
        yield Notice(revocations_key, REVOCATIONS, membership.revocations_bytes)
    for use in membership.uses:
        yield Notice(uses_key, use_subkey(use.member), use.member.certificate)


def take_in(membership: Membership, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    """Learn from what the table gave; whether a newer revocation list was in it."""
    news = False
    for records in found.values():
        for subkey, record in records.items():
            try:
                if subkey == REVOCATIONS:
                    news |= membership.take_list(record.value)
                elif subkey.startswith(USE):
                    membership.note_use(record.value, now)
            except ProtocolError:
                continue  # whoever stored it is not our concern: the table's validator refuses it in time
    return news


def due(membership: Membership, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> list[Notice]:
    """The notices that the table lacks, or holds in an older form, or will not hold much longer."""
    return [notice for notice in own_notices(membership) if not _is_kept(notice, found, now)]


def _is_kept(notice: Notice, found: Mapping[bytes, Mapping[bytes, Record]], now: float) -> bool:
    record = found.get(notice.key, {}).get(notice.subkey)
    if record is None or record.expires_at <= now + RENEW_S:
        return False
    return notice.subkey != REVOCATIONS or record.value == notice.value  # any certificate of a user says that it is one


def use_subkey(member: Member) -> bytes:
    """Return where in the table the certificate of a member by a limited invite lies."""
    return USE + member.invite + b":" + member.peer.encode()
