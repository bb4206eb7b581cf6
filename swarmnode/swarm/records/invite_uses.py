"""Who has used the invites that only so many peers may use. Nobody counts for all: each peer counts what it hears of.

Every use is a certificate, which the table carries to everybody. A peer admits the first so many users that it hears of, and
forgets none. Two that use the last place at the same time in different corners are both let in at first; as soon as their
certificates meet, the one of the earlier admission stays, everywhere. An admission older than `RACE_S` displaces nobody, so a
latecomer cannot push out a member by an old date; where a member was never heard of, he can: a limit is as good as the
table's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.revocation import revoked_digest

RACE_S = 60.0
MAX_INVITES = 256


@dataclass(frozen=True)
class InviteUse:
    """A member by a limited invite, and when this peer first heard of it (unix time, seconds)."""

    member: Member
    heard_at: float

    @property
    def order(self) -> tuple[int, bytes]:
        """Who of two that race is the first."""
        return self.member.admitted_at, revoked_digest(self.member.peer)


class InviteUses:
    """The known uses by invite. Nothing here waits or reads a clock."""

    def __init__(self) -> None:
        self._by_invite: dict[bytes, dict[PeerId, InviteUse]] = {}

    def __repr__(self) -> str:
        return f"<InviteUses of {len(self._by_invite)} invites by {sum(map(len, self._by_invite.values()))} peers>"

    def __iter__(self) -> Iterator[InviteUse]:
        return (use for users in list(self._by_invite.values()) for use in list(users.values()))

    def count(self, invite: bytes) -> int:
        """Places of an invite that are taken."""
        return len(self._by_invite.get(invite, ()))

    def admits(self, member: Member, now: float) -> bool:
        """Whether the member has a place; one that is free, or that it wins in a race, is taken by this."""
        if not member.uses:
            return True
        if member.invite not in self._by_invite and len(self._by_invite) >= MAX_INVITES:
            return False
        users = self._by_invite.setdefault(member.invite, {})
        if member.peer in users:
            return True
        if len(users) >= member.uses and not self._wins_a_place(users, InviteUse(member, now), now):
            return False
        users[member.peer] = InviteUse(member, now)
        return True

    @staticmethod
    def _wins_a_place(users: dict[PeerId, InviteUse], use: InviteUse, now: float) -> bool:
        """Free the place of the latest of those heard of just now, if the newcomer was there before it."""
        if abs(now - use.member.admitted_at) > RACE_S:
            return False
        racing = [other for other in users.values() if now - other.heard_at <= RACE_S]
        latest = max(racing, key=lambda other: other.order, default=None)
        if latest is None or latest.order <= use.order:
            return False
        del users[latest.member.peer]
        return True

    def forget(self, invites: Iterable[bytes]) -> None:
        """Drop the uses of invites that are worth nothing any more."""
        for invite in invites:
            self._by_invite.pop(invite, None)
