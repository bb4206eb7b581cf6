"""Client of a swarm's owner: it reads the members of a running swarm, and hands the owner's revocations to it.

What the swarm tells now is put beside the owner's book, which has every member that was ever seen. So members can be listed and
revoked while no machine is online.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarmnode.errors import UsageError
from swarmnode.membership.owner import find_invite, newest_list, revoke
from swarmnode.net.identity import SigningKey, is_peer_id
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host, joining, state_name
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.records.manifest import OPEN, PRIVATE
from swarmnode.swarm.records.membership import RevocationList, nobody, open_list
from swarmnode.swarm.storage.owner_files import AdmittedPeer, IssuedInvite, IssuedInvites, record_members
from swarmnode.swarm.storage.swarmfile import Swarm

MIN_END_CHARS = 6
ONLINE, OFFLINE = "online", "offline"  # states of peers that announce none


class OwnerClient:
    """Owner's client. Create it with `join` and end it with `close`, or create it on a host that others close. Raises UsageError if
    the swarm has no owner."""

    def __init__(self, host: Host) -> None:
        _check_owned(host.swarm)
        assert host.access_control is not None
        self._host = host
        self._access_control = host.access_control

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

    def uses(self) -> dict[str, int]:
        """Return how many users each limited invite has that was used, by its id in hex."""
        uses = self._access_control.membership.uses
        return {use.member.invite.hex(): uses.count(use.member.invite) for use in uses}

    def states(self) -> dict[PeerId, str]:
        """Return the states of the peers that are online, without this client: as announced, or `ONLINE`."""
        announced = {peer: state_name(each.life) for peer, each in self._host.directory.peers().items()}
        states = {**dict.fromkeys(self._access_control.linked, ONLINE), **announced}
        states.pop(self._host.peer_id, None)
        return states

    def seen(self) -> list[AdmittedPeer]:
        """Return the known peers, without this client: those that announce themselves or used a limited invite. A peer of a public
        swarm has no invite."""
        announced = self._host.directory.peers()
        admitted = {
            peer.peer: peer
            for peer in self._access_control.admitted({peer: each.name for peer, each in announced.items()})
        }
        now = int(self._host.clock.unix())
        strangers = {
            peer: AdmittedPeer(peer, "", "", "", "", 0, 0, now, each.name)
            for peer, each in announced.items()
            if peer not in admitted
        }
        return [peer for peer in (*admitted.values(), *strangers.values()) if peer.peer != self._host.peer_id]

    async def publish(self, revocations: bytes) -> int:
        """Hand the owner's next list of revocations to the swarm; return the number of peers that received it."""
        return await self._access_control.publish(revocations, self._host.directory.peers())


@dataclass
class MemberEntry:
    """A member with all peers of its home that were ever seen. The terms are those of the peer seen last; `is_alone` means that its
    invite is for one machine, so that the note says who it is."""

    peers: list[AdmittedPeer]
    note: str
    is_alone: bool
    revoked: bool
    states: Mapping[PeerId, str] = field(default_factory=dict)

    @property
    def last(self) -> AdmittedPeer:
        """Peer that was seen last."""
        return max(self.peers, key=lambda peer: (peer.seen_at, peer.joined_at))

    @property
    def name(self) -> str:
        """Name that a peer of it announced last; empty if none did."""
        named = [peer for peer in self.peers if peer.name]
        return max(named, key=lambda peer: peer.seen_at).name if named else ""

    @property
    def label(self) -> str:
        """Short text for people: the note of an invite for it alone, the name, the note, or the end of a peer's id."""
        return (self.is_alone and self.note) or self.name or self.note or self.last.peer[-8:]

    def state(self, peer: PeerId) -> str:
        """Return the state of a peer of it; `OFFLINE` if the swarm does not know one."""
        return self.states.get(peer, OFFLINE)

    def matches(self, who: str) -> bool:
        """Return whether `who` names the member: by a name, a peer's id or the id's end, or the beginning of the member's id."""
        if any(who and who in (peer.peer, peer.name) for peer in self.peers):
            return True
        return len(who) >= MIN_END_CHARS and (
            any(peer.peer.endswith(who) for peer in self.peers) or self.last.user.startswith(who)
        )

    def to_json(self) -> dict[str, Any]:
        """Return its facts for people and scripts. None means never, or unknown in a public swarm."""
        last, states = self.last, {peer.peer: self.state(peer.peer) for peer in self.peers}
        return {
            "id": last.user,
            "label": self.label,
            "name": self.name,
            "note": self.note,
            "state": next((state for state in states.values() if state != OFFLINE), OFFLINE),
            "role": last.role,
            "group": last.group,
            "invite": last.invite,
            "joined_at": min(peer.joined_at for peer in self.peers) or None,
            "seen_at": last.seen_at,
            "expires_at": last.expires_at or None,
            "revoked": self.revoked,
            "peers": [{"peer": peer, "state": state} for peer, state in states.items()],
        }


@dataclass(frozen=True)
class OwnersView:
    """Members, invites and revocations of a swarm: from the owner's book, and from the swarm itself if it can be reached. Create it
    with `read`."""

    swarm: Swarm
    book: IssuedInvites | None  # None without the owner's .swarm file
    members: list[MemberEntry]
    uses: Mapping[str, int]
    revocations: RevocationList
    is_online: bool

    @classmethod
    async def read(cls, swarm: Swarm, book: IssuedInvites | None, client: OwnerClient | None) -> OwnersView:
        """Read the book and, if there is a `client`, what the swarm tells; then note the new members in the book.

        Raises UsageError if the book cannot be read, LocalError if it cannot be written.
        """
        seen = client.seen() if client else []
        admitted: Iterable[AdmittedPeer] = seen
        if book is not None and swarm.file is not None and book.path.is_file():
            noted = await asyncio.to_thread(record_members, swarm.file, [peer for peer in seen if peer.invite])
            admitted = [*noted, *(peer for peer in seen if not peer.invite)]
        listed = newest_list(
            swarm, [swarm.revocations, book.revocations if book else b"", client.revocations if client else b""]
        )
        revocations = open_list(listed, swarm.id, swarm.owner) if listed else nobody(swarm.id)
        guests = {guest.invite: guest for guest in book.guests} if book else {}
        by_user: dict[str, list[AdmittedPeer]] = defaultdict(list)
        for peer in admitted:
            by_user[peer.user].append(peer)
        states = client.states() if client else {}
        members = []
        for peers in by_user.values():
            named = [guest for peer in reversed(peers) if (guest := guests.get(peer.invite)) and guest.note]
            note, is_alone = (named[0].note, named[0].uses == 1) if named else ("", False)
            ended = all(
                revocations.covers(peer.peer, bytes.fromhex(peer.invite), bytes.fromhex(peer.home)) for peer in peers
            )
            members.append(MemberEntry(peers, note, is_alone, ended, states))
        users: dict[str, int] = defaultdict(int)
        for peers in by_user.values():
            for invite in {peer.invite for peer in peers if peer.invite}:
                users[invite] += 1
        uses = {**users, **(client.uses() if client else {})}
        return cls(swarm, book, members, uses, revocations, client is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the view in the format of `swarmnode members --json`."""
        return {
            "swarm": self.swarm.id.hex(),
            "name": self.swarm.name,
            "membership": PRIVATE if self.swarm.private else OPEN,
            "online": self.is_online,
            "members": [member.to_json() for member in self.members],
            "uses": dict(self.uses),
            "revocations": {
                "number": self.revocations.number,
                "peers": len(self.revocations.peers),
                "invites": [invite.hex() for invite in self.revocations.invites],
            },
            "invites": [self._invite_json(guest) for guest in (self.book.guests if self.book else ())],
        }

    def _invite_json(self, guest: IssuedInvite) -> dict[str, Any]:
        return {
            **guest.terms(),
            "issued_at": guest.issued_at,
            "used": self.uses.get(guest.invite, 0),
            "note": guest.note,
            "revoked": self._is_revoked(guest),
        }

    def _is_revoked(self, guest: IssuedInvite) -> bool:
        return bytes.fromhex(guest.invite) in self.revocations.invites

    def find(self, who: str) -> Revocation:
        """Return the revocation of what `who` names: an invite (its line, its id or the beginning, its note) or a member (a name, a
        peer's id or its end, the beginning of the member's id), or any peer by its whole id. Raises UsageError if there is none,
        or more than one."""
        if self.book is not None and (invite := find_invite(who, self.swarm, self.book)) is not None:
            return Revocation(f"invite {invite.hex()}", invites=(invite,))
        guests = self.book.guests if self.book else []
        noted = [guest.invite for guest in guests if who and guest.note == who and not self._is_revoked(guest)]
        members = [
            member
            for member in self.members
            if member.matches(who) and not any(peer.invite in noted for peer in member.peers)
        ]
        if len(noted) + len(members) > 1:
            ids = ", ".join([*(member.last.peer[-8:] for member in members), *(invite[:8] for invite in noted)])
            raise UsageError(
                f"{who} matches {len(noted) + len(members)} members and invites; give the id of one: {ids}"
            )
        if noted:
            return Revocation(who, invites=(bytes.fromhex(noted[0]),))
        if members:
            return self._of_member(members[0])
        if is_peer_id(who):
            return Revocation(who, peers=(who,))
        raise UsageError(
            f"{who} is neither a member of {self.swarm.name} nor an invite that you gave out; `swarmnode members` lists both"
        )

    def _of_member(self, member: MemberEntry) -> Revocation:
        """Return what ends a membership: its invites if no other member came by them, else the home and its known peers."""
        guests = {guest.invite: guest for guest in (self.book.guests if self.book else ())}
        ended = {peer.invite for peer in member.peers if (guest := guests.get(peer.invite)) and guest.uses == 1}
        staying = [peer for peer in member.peers if peer.invite not in ended]
        return Revocation(
            member.label,
            peers=tuple(dict.fromkeys(peer.peer for peer in staying)),
            homes=tuple(dict.fromkeys(bytes.fromhex(peer.home) for peer in staying if peer.home)),
            invites=tuple(map(bytes.fromhex, sorted(ended))),
        )


@dataclass(frozen=True)
class Revocation:
    """Peers, homes and invites that one revocation ends; `name` is for people."""

    name: str
    peers: tuple[PeerId, ...] = ()
    homes: tuple[bytes, ...] = ()
    invites: tuple[bytes, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it for people and scripts."""
        return {"name": self.name, "peers": list(self.peers), "invites": [invite.hex() for invite in self.invites]}


async def end_membership(
    swarm: Swarm, owner: SigningKey, book: IssuedInvites, client: OwnerClient | None, ended: Revocation
) -> int:
    """Save a revocation in the owner's book, and tell the swarm if there is a `client`. Return the number of peers that received
    it; if it is 0, the list spreads when a node runs with the owner's file. Raises UsageError, LocalError."""
    current = newest_list(swarm, [book.revocations, client.revocations if client else b""])
    book.revocations = revoke(swarm, owner, current, peers=ended.peers, invites=ended.invites, homes=ended.homes)
    book.save()
    return await client.publish(book.revocations) if client else 0


def _check_owned(swarm: Swarm) -> None:
    if not swarm.owner:
        raise UsageError(f"{swarm.name} has no owner: everyone may join it, and no one can be revoked")
