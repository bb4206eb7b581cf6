"""The owner client: a member who asks a running swarm who belongs to it, and hands it the owner's revocations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.client.joining import joining
from swarmnode.errors import UsageError
from swarmnode.membership.owner import newest_list, revoke
from swarmnode.net.identity import SigningKey, is_peer_id
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, state_name
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.manifest import OPEN, PRIVATE
from swarmnode.swarm.storage.issued_invites import IssuedInvite, IssuedInvites
from swarmnode.swarm.storage.swarmfile import Swarm

MIN_END_CHARS = 6


class OwnerClient:
    """Made by `join`, ended by `close`; or on a host that is there already, which others end. Raises UsageError where the swarm
    has no owner."""

    def __init__(self, host: Host) -> None:
        _check_owned(host.swarm)
        assert host.access_control is not None
        self._host = host
        self._access_control = host.access_control

    def __repr__(self) -> str:
        return f"<OwnerClient {self._host!r}>"

    @classmethod
    async def join(cls, swarm: Swarm, home: Path, *, platform: Platform = MACHINE) -> OwnerClient:
        """Join as a client, and learn what the swarm knows of its members. Raises NetworkDown, NotAdmitted, UsageError."""
        _check_owned(swarm)
        async with joining(swarm, home, platform=platform) as host:
            self = cls(host)
            await self.refresh()
        return self

    async def refresh(self) -> None:
        """Read now what the swarm knows of its members and of revocations. Where the network is down, nothing is new."""
        await self._access_control.exchange()
        await self._host.directory.refresh()

    async def close(self) -> None:
        """Leave the swarm."""
        await self._host.close()

    @property
    def revocations(self) -> bytes:
        """The newest list that the swarm knows, as the owner signed it; empty where there is none."""
        return self._access_control.membership.revocations_bytes

    def find_peer(self, text: str) -> PeerId | None:
        """The member whose id is, or ends with, this text, or who has this name; None where there is none.

        Raises UsageError where there are several.
        """
        members = self._members()
        found = {
            member["peer"]
            for member in members
            if member["peer"] == text or (len(text) >= MIN_END_CHARS and member["peer"].endswith(text))
        } or {member["peer"] for member in members if text and member["name"] == text}
        if len(found) > 1:
            ids = ", ".join(sorted(peer[-8:] for peer in found))
            raise UsageError(f"{text} may be any of {len(found)} peers; give the end of one's id: {ids}")
        return found.pop() if found else None

    async def publish(self, revocations: bytes) -> int:
        """Hand the owner's next list to the swarm; how many peers were told."""
        return await self._access_control.publish(revocations, self._host.directory.peers())

    def picture(self, guests: Sequence[IssuedInvite] = ()) -> dict[str, Any]:
        """As `swarmnode members --json` prints it: members, how often each limited invite was used, revocations, and the invites
        of the owner's book, which are `guests`. Members are those that have announced themselves or used a limited invite:
        nobody keeps a list of those who only ask."""
        membership = self._access_control.membership
        picture = {
            "swarm": membership.swarm.hex(),
            "name": self._host.swarm.name,
            "membership": PRIVATE if membership.private else OPEN,
            "members": self._members(),
            "uses": {use.member.invite.hex(): membership.uses.count(use.member.invite) for use in membership.uses},
            "revocations": {
                "number": membership.revocations.number,
                "peers": len(membership.revocations.peers),
                "invites": [invite.hex() for invite in membership.revocations.invites],
            },
        }
        return {**picture, "invites": invites_given_out(guests, picture)}

    def _members(self) -> list[dict[str, Any]]:
        announced = self._host.directory.peers()
        certified = {member.peer: member for member in self._access_control.membership.members(self._host.clock.unix())}
        certified.pop(self._host.peer_id, None)
        return [
            {"peer": peer, **_seen(announced.get(peer)), **_certified(certified.get(peer))}
            for peer in sorted({*announced, *certified})
        ]


def invites_given_out(guests: Sequence[IssuedInvite], picture: dict[str, Any]) -> list[dict[str, Any]]:
    """The owner's book beside what the swarm knows: whether an invite was revoked, and how many used it: all who ever did
    where its uses are counted, else the members by it that were seen."""
    seen = Counter(member.get("invite") for member in picture["members"])
    return [
        {
            **guest.told(),
            "issued_at": guest.issued_at,
            "used": picture["uses"].get(guest.invite, 0) if guest.uses else seen[guest.invite],
            "note": guest.note,
            "revoked": guest.invite in picture["revocations"]["invites"],
        }
        for guest in guests
    ]


def find_member(who: str, swarm: Swarm, book: IssuedInvites, client: OwnerClient | None) -> PeerId:
    """The peer that a text means which is no invite: a member, or any peer's whole id. Raises UsageError where it means none."""
    peer = (client and client.find_peer(who)) or (who if is_peer_id(who) else None)
    if peer is None:
        raise UsageError(f"{who} is neither a member of {swarm.name} nor an invite in {book.path}")
    return peer


async def end_membership(
    swarm: Swarm,
    owner: SigningKey,
    book: IssuedInvites,
    client: OwnerClient | None,
    *,
    peer: PeerId | None = None,
    invite: bytes | None = None,
) -> int:
    """Revoke a peer or an invite: enter it into the owner's book, and tell it to the swarm where there is a client. Returns how
    many peers were told; where it is 0, the list spreads when a node runs with the owner's file. Raises UsageError, LocalError.
    """
    current = newest_list(swarm, [book.revocations, client.revocations if client else b""])
    peers, invites = [peer] if peer else [], [invite] if invite else []
    book.revocations = revoke(swarm, owner, current, peers=peers, invites=invites)
    book.save()
    return await client.publish(book.revocations) if client else 0


def _check_owned(swarm: Swarm) -> None:
    if not swarm.owner:
        raise UsageError(f"{swarm.name} has no owner: everybody may join, and nobody can be revoked")


def _seen(announcement: Announcement | None) -> dict[str, Any]:
    if announcement is None:
        return {"name": "", "state": "unseen"}
    return {"name": announcement.name, "state": state_name(announcement.life)}


def _certified(member: Member | None) -> dict[str, Any]:
    if member is None:
        return {}
    return {
        "role": member.role.name.lower(),
        "group": member.group,
        "invite": member.invite.hex(),
        "joined_at": member.admitted_at,
        "expires_at": member.expires_at or None,
    }
