"""Membership: the peers that belong to a swarm with an owner, as far as this peer knows. It reads no clock.

A private swarm admits by certificates. A public swarm admits every peer that its owner did not revoke. Checked
certificates are remembered by peer, because a link, a DHT call and an announcement ask the same question.

Revocation list: the peers, homes and invites that the owner no longer admits. Signed, numbered, complete: a newer list
replaces an older.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from swarmnode.errors import ErrorCode, ProtocolError, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.invite import (
    INVITE_ID_BYTES,
    MAX_SKEW_S,
    Member,
    Role,
    SwarmId,
    UnixTime,
    open_certificate,
)
from swarmnode.swarm.records.signed import OwnerSigned, Signable

VERSION = 1
DOMAIN = b"swarmnode revocations 1\n"
PEER_DIGEST_BYTES = (
    16  # of the SHA-256 of the peer's id or the home's key: long enough that no other can be found for it
)
MAX_REVOKED_PEERS = 160
MAX_REVOKED_INVITES = 96
MAX_LIST_BYTES = 4096  # the DHT takes no longer values

RevokedDigest = Annotated[bytes, Meta(min_length=PEER_DIGEST_BYTES, max_length=PEER_DIGEST_BYTES)]
InviteId = Annotated[bytes, Meta(min_length=INVITE_ID_BYTES, max_length=INVITE_ID_BYTES)]


class RevocationList(Signable, frozen=True):
    """Revoked peers, homes and invites of one swarm; homes stand among the peers. Newer versions append fields."""

    version: Annotated[int, Meta(ge=VERSION)]
    swarm: SwarmId
    number: Annotated[int, Meta(gt=0, lt=1 << 32)]  # grows with every list of this swarm
    issued_at: UnixTime  # in seconds
    peers: Annotated[tuple[RevokedDigest, ...], Meta(max_length=MAX_REVOKED_PEERS)] = ()
    invites: Annotated[tuple[InviteId, ...], Meta(max_length=MAX_REVOKED_INVITES)] = ()

    def __repr__(self) -> str:
        return f"<RevocationList #{self.number}, {len(self.peers)} peers, {len(self.invites)} invites>"

    def covers(self, peer: PeerId, invite: bytes = b"", home: bytes = b"") -> bool:
        """Return whether a peer is on the list, by its own id, its invite or its home's public key; these may be empty."""
        return (
            revoked_digest(peer) in self.peers
            or invite in self.invites
            or (bool(home) and home_digest(home) in self.peers)
        )

    def extended(
        self, now: float, *, peers: Iterable[PeerId] = (), invites: Iterable[bytes] = (), homes: Iterable[bytes] = ()
    ) -> RevocationList:
        """Return the next list, with these peers, invites and homes (public keys) added. Raises UsageError if it would be too
        long."""
        digests = dict.fromkeys([*self.peers, *map(revoked_digest, peers), *map(home_digest, homes)])
        ids = dict.fromkeys([*self.invites, *invites])
        if len(digests) > MAX_REVOKED_PEERS or len(ids) > MAX_REVOKED_INVITES:
            raise UsageError(
                f"a revocation list holds {MAX_REVOKED_PEERS} peers and {MAX_REVOKED_INVITES} invites, and this one is full: "
                "found a new swarm and invite the members who shall stay"
            )
        return msgspec.structs.replace(
            self, number=self.number + 1, issued_at=int(now), peers=tuple(digests), invites=tuple(ids)
        )


def nobody(swarm: bytes) -> RevocationList:
    """Return the list before the first revocation. It has number 0 and is never sent."""
    return RevocationList(VERSION, swarm, 0, 0)


def revoked_digest(peer: PeerId) -> bytes:
    """Return 16 bytes that stand for a peer on a list."""
    return hashlib.sha256(peer.encode()).digest()[:PEER_DIGEST_BYTES]


def home_digest(home: bytes) -> bytes:
    """Return 16 bytes that stand for a home with this public key on a list."""
    return hashlib.sha256(home).digest()[:PEER_DIGEST_BYTES]


_LISTS = OwnerSigned("revocation list", RevocationList, domain=DOMAIN, max_bytes=MAX_LIST_BYTES)
sign_list, open_list = _LISTS.sign, _LISTS.open


MAX_MEMBERS = 16_384
RACE_S = 60.0
EXPIRED = "its membership has expired"
TOO_EARLY = "its admission lies in the future; is a clock wrong?"
CLOCKED = (EXPIRED, TOO_EARLY)  # objections that a wrong clock makes, too
MAX_INVITES = 256
MAX_PEERS_OF_A_HOME = 8  # a node and seven programs at once that ask

Key = TypeVar("Key")


@dataclass(frozen=True)
class InviteUse:
    """Use of a limited invite by a member; `seen_at` is when this peer first heard of it (unix time, seconds)."""

    member: Member
    seen_at: float

    @property
    def order(self) -> tuple[int, bytes]:
        """Sort key of uses that race for a place: the earlier admission first."""
        return self.member.admitted_at, revoked_digest(self.member.peer)


class InviteUses:
    """Known uses by invite and user: a user is a home with its peers, or a peer that named none. It neither waits nor reads a
    clock."""

    def __init__(self) -> None:
        self._by_invite: dict[bytes, dict[bytes, dict[PeerId, InviteUse]]] = {}

    def __iter__(self) -> Iterator[InviteUse]:
        everyone = [peers for users in self._by_invite.values() for peers in users.values()]
        return (use for peers in everyone for use in list(peers.values()))

    def count(self, invite: bytes) -> int:
        """Return the number of users that have a place of an invite."""
        return len(self._by_invite.get(invite, ()))

    def objection(self, member: Member, now: float, *, shown: bool = False) -> str | None:
        """Return why the member has no place of its invite; None if it has one. It takes one if a place is free or it wins one in a
        race.

        `shown` means that the peer itself showed the certificate. Only then its home takes over the place of a peer that had named
        none: else a holder of the invite could declare that peer its own.
        """
        if not member.uses:
            return None
        if member.invite not in self._by_invite and len(self._by_invite) >= MAX_INVITES:
            return "too many invites are in use"
        users = self._by_invite.setdefault(member.invite, {})
        peers = users.get(member.user, {})
        if member.peer in peers or (not member.home and any(member.peer in each for each in users.values())):
            return None
        use, alone = InviteUse(member, now), users.get(member.peer.encode())
        if alone:
            if not shown:
                return None
            use = InviteUse(member, alone[member.peer].seen_at)
            del users[member.peer.encode()]
        if not peers and len(users) >= member.uses and not _make_room(users, _first_uses(users), use, now):
            return "its invite was used up by others"
        if len(peers) >= MAX_PEERS_OF_A_HOME and not _make_room(peers, peers, use, now):
            return f"its home has {MAX_PEERS_OF_A_HOME} programs in the swarm already"
        users.setdefault(member.user, peers)[member.peer] = use
        return None

    def forget(self, invites: Iterable[bytes]) -> None:
        """Drop the uses of invites that are no longer valid."""
        for invite in invites:
            self._by_invite.pop(invite, None)


def _first_uses(users: Mapping[bytes, Mapping[PeerId, InviteUse]]) -> dict[bytes, InviteUse]:
    """Return the earliest use of each user, with the time at which this peer first heard of the user."""
    return {
        user: InviteUse(
            min(peers.values(), key=lambda use: use.order).member, min(use.seen_at for use in peers.values())
        )
        for user, peers in users.items()
    }


def _make_room(places: dict[Key, Any], taken: Mapping[Key, InviteUse], use: InviteUse, now: float) -> bool:
    """Free the place of the latest use heard of just now, if `use` was admitted before it. Returns whether a place was freed."""
    if abs(now - use.member.admitted_at) > RACE_S:
        return False
    racing = {key: other for key, other in taken.items() if now - other.seen_at <= RACE_S}
    latest = max(racing, key=lambda key: racing[key].order, default=None)
    if latest is None or racing[latest].order <= use.order:
        return False
    del places[latest]
    return True


class Membership:
    """Members of a swarm with an owner, and its revocations. `certificate` is this peer's own, empty in a public swarm."""

    def __init__(self, swarm: bytes, owner: bytes, *, private: bool, certificate: bytes = b"") -> None:
        self.swarm = swarm
        self.owner = owner
        self.private = private
        self.certificate = certificate
        self.revocations = nobody(swarm)
        self.revocations_bytes = b""  # as the owner signed them; empty before the first
        self.uses = InviteUses()
        self._members: dict[PeerId, Member] = {}

    def __repr__(self) -> str:
        kind = "private" if self.private else "public"
        return f"<Membership {kind}, {len(self._members)} members met, {self.revocations!r}>"

    # -- admission

    def admit(self, peer: PeerId, proof: bytes, now: float) -> None:
        """Admit a peer with an authenticated id by its certificate, which only a private swarm needs.

        Raises ProtocolError: REFUSED if the peer is not a member, BUSY if it is none by the present time alone, or if too many
        members are known.
        """
        self._admit(peer, proof, now, shown=True)

    def _admit(self, peer: PeerId, proof: bytes, now: float, *, shown: bool) -> None:
        member: Member | None = None
        if self.private:
            try:
                member = open_certificate(proof, self.swarm, self.owner)
            except ProtocolError as error:
                raise ProtocolError(f"{peer}: {error}", code=ErrorCode.REFUSED, peer=peer) from None
            if member.peer != peer:
                raise ProtocolError("the certificate is for another peer", code=ErrorCode.REFUSED, peer=peer)
        reason = self._objection(peer, member, now, shown=shown)
        if reason is not None:
            code = ErrorCode.BUSY if reason in CLOCKED else ErrorCode.REFUSED  # this peer's clock may be the wrong one
            raise ProtocolError(f"{peer}: {reason}", code=code, peer=peer)
        if member is None:
            return
        if peer not in self._members and len(self._members) >= MAX_MEMBERS and not self._make_room(member.invite):
            raise ProtocolError("this node knows too many members already", code=ErrorCode.BUSY, peer=peer)
        self._members[peer] = member

    def _make_room(self, invite: bytes) -> bool:
        """Forget the newest member of the invite with the most members.

        So a member that invents members with its invite keeps out no peer with another invite. Returns False if no
        invite has at least two members more than `invite`.
        """
        counts = Counter(member.invite for member in self._members.values())
        ((largest, most),) = counts.most_common(1)
        if most <= counts[invite] + 1:
            return False
        del self._members[next(peer for peer in reversed(self._members) if self._members[peer].invite == largest)]
        return True

    def _objection(self, peer: PeerId, member: Member | None, now: float, *, shown: bool = False) -> str | None:
        """Return why this peer is not admitted now; None if it is."""
        named = (peer,) if member is None else (member.peer, member.invite, member.home)
        if self.revocations.covers(*named):
            return "its membership was revoked"
        return None if member is None else self._objection_to_use(member, now, shown=shown)

    def _objection_to_use(self, member: Member, now: float, *, shown: bool = False) -> str | None:
        """Return why the certificate is not valid now; None if it is. A free place of a limited invite is taken."""
        if member.expired(now):
            return EXPIRED
        if member.admitted_at > now + MAX_SKEW_S:
            return TOO_EARLY
        return self.uses.objection(member, now, shown=shown)

    def stands(self, peer: PeerId, now: float) -> bool:
        """Return whether a peer belongs to the swarm now, by its certificate as known here."""
        if not self.private:
            return not self.revocations.covers(peer)
        member = self._members.get(peer)
        return member is not None and self._objection(peer, member, now) is None

    def own(self) -> Member | None:
        """Return the content of this peer's own certificate; None in a public swarm. Raises ProtocolError if it is
        invalid."""
        return open_certificate(self.certificate, self.swarm, self.owner) if self.private else None

    def own_role(self) -> Role:
        """Return the role of this peer in the swarm; TRAINER in a public swarm."""
        own = self.own()
        return Role.TRAINER if own is None else own.role

    def objection_to_us(self, peer: PeerId, now: float) -> str | None:
        """Return why other peers will not admit this peer, as far as known here; None if no reason is known."""
        return self._objection(peer, self.own(), now)

    def member(self, peer: PeerId) -> Member | None:
        """Return the content of a peer's certificate; None if none is known."""
        return self._members.get(peer)

    def role(self, peer: PeerId) -> Role:
        """Return a peer's role: TRAINER in a public swarm; CLIENT if no certificate of it is known."""
        if not self.private:
            return Role.TRAINER
        member = self._members.get(peer)
        return Role.CLIENT if member is None else member.role

    def members(self, now: float) -> Iterator[Member]:
        """Yield all known members that belong to the swarm now."""
        return (member for peer, member in sorted(self._members.items()) if self.stands(peer, now))

    # -- revocations and uses

    def adopt_list(self, raw: bytes) -> bool:
        """Take over a newer revocation list. Returns False if it is not newer. Raises ProtocolError if the owner did
        not sign it."""
        revocations = open_list(raw, self.swarm, self.owner)
        if revocations.number <= self.revocations.number:
            return False
        self.revocations, self.revocations_bytes = revocations, raw
        self.uses.forget(revocations.invites)
        self._members = {
            peer: member
            for peer, member in self._members.items()
            if not revocations.covers(member.peer, member.invite, member.home)
        }
        return True

    def record_use(self, certificate: bytes, now: float) -> bool:
        """Record that a peer used a limited invite. Returns whether the peer has a place.

        A revoked user keeps its place: otherwise it could come back by the same invite under another id. Raises
        ProtocolError if the certificate is invalid.
        """
        member = open_certificate(certificate, self.swarm, self.owner)
        revoked = member.invite in self.revocations.invites
        if not member.uses or revoked or self._objection_to_use(member, now) is not None:
            return False
        if len(self._members) < MAX_MEMBERS:
            self._members.setdefault(member.peer, member)
        return True

    # -- announcements

    def vouch(self, announcement: Announcement, certificate: bytes, now: float) -> None:
        """Check that the author of an announcement may announce it. Raises ProtocolError (REFUSED, or BUSY as `admit`
        does)."""
        peer = announcement.peer
        self._admit(peer, certificate, now, shown=False)
        role = self.role(peer)
        if role < Role.BOOTSTRAP:
            raise ProtocolError("it is a client, and must not announce itself", code=ErrorCode.REFUSED, peer=peer)
        if role < Role.VOLUNTEER and announcement.span[0] < announcement.span[1]:
            raise ProtocolError("it is a bootstrap peer, and must not claim layers", code=ErrorCode.REFUSED, peer=peer)
