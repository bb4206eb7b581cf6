"""Client of a swarm's owner: it reads the members of a running swarm, and hands the owner's revocations to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.membership.owner import newest_list, revoke
from swarmnode.net.identity import SigningKey, is_peer_id
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining, state_name
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.manifest import OPEN, PRIVATE
from swarmnode.swarm.storage.issued_invites import IssuedInvite, IssuedInvites
from swarmnode.swarm.storage.swarmfile import Swarm

MIN_END_CHARS = 6


class OwnerClient:
    """Owner's client. Create it with `join` and end it with `close`, or create it on a host that others close. Raises UsageError if
    the swarm has no owner."""

    def __init__(self, host: Host) -> None:
        _check_owned(host.swarm)
        assert host.access_control is not None
        self._host = host
        self._access_control = host.access_control

    def __repr__(self) -> str:
        return f"<OwnerClient {self._host!r}>"

    @classmethod
    async def join(cls, swarm: Swarm, home: Path, *, platform: Platform = MACHINE) -> OwnerClient:
        """Join the swarm as a client, and read what it knows of its members. Raises NetworkDown, NotAdmitted, or UsageError if
        the swarm has no owner."""
        _check_owned(swarm)
        async with joining(swarm, home, platform=platform) as host:
            self = cls(host)
            await self.refresh()
        return self

    async def refresh(self) -> None:
        """Read now what the swarm knows of its members and of revocations. If the network is down, nothing changes."""
        await self._access_control.exchange()
        await self._host.directory.refresh()

    async def close(self) -> None:
        """Leave the swarm."""
        await self._host.close()

    @property
    def revocations(self) -> bytes:
        """Newest list of revocations that the swarm knows, as signed by the owner; empty if there is none."""
        return self._access_control.membership.revocations_bytes

    def find_peer(self, text: str) -> PeerId | None:
        """Return the member whose id is `text` or ends with it, or whose name is `text`; None if there is none. Only an end of at
        least `MIN_END_CHARS` characters counts.

        Raises UsageError if several members match.
        """
        members = self._members()
        found = {
            member["peer"]
            for member in members
            if member["peer"] == text or (len(text) >= MIN_END_CHARS and member["peer"].endswith(text))
        } or {member["peer"] for member in members if text and member["name"] == text}
        if len(found) > 1:
            ids = ", ".join(sorted(peer[-8:] for peer in found))
            raise UsageError(f"{text} matches {len(found)} machines; give the end of one machine's id: {ids}")
        return found.pop() if found else None

    async def publish(self, revocations: bytes) -> int:
        """Hand the owner's next list of revocations to the swarm; return the number of peers that received it."""
        return await self._access_control.publish(revocations, self._host.directory.peers())

    def picture(self, guests: Sequence[IssuedInvite] = ()) -> dict[str, Any]:
        """Return the members, the use counts of limited invites, the revocations, and the owner's invites `guests`, in the format
        of `swarmnode members --json`. Members are peers that have announced themselves or used a limited invite; no list exists of
        peers that only ask."""
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
    """Return the owner's invites, each with whether it was revoked and how many peers used it. If its uses are limited, they are
    counted by the swarm; else the members that came by it and were seen are counted."""
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
    """Return the peer that `who` means: a member by its id, the id's end or its name, or any peer by its whole id. Raises
    UsageError if there is none."""
    peer = (client and client.find_peer(who)) or (who if is_peer_id(who) else None)
    if peer is None:
        raise UsageError(
            f"{who} is neither a member of {swarm.name} nor an invite in {book.path}; `swarmnode members` lists both"
        )
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
    """Revoke a peer or an invite: save the revocation in the owner's book, and tell the swarm if there is a `client`. Return the
    number of peers that received it; if it is 0, the list spreads when a node runs with the owner's file. Raises UsageError,
    LocalError."""
    current = newest_list(swarm, [book.revocations, client.revocations if client else b""])
    peers, invites = [peer] if peer else [], [invite] if invite else []
    book.revocations = revoke(swarm, owner, current, peers=peers, invites=invites)
    book.save()
    return await client.publish(book.revocations) if client else 0


def _check_owned(swarm: Swarm) -> None:
    if not swarm.owner:
        raise UsageError(
            f"{swarm.name} has no owner: everyone may join it, and no one "
            "can be revoked; create a private swarm to choose its members"
        )


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
