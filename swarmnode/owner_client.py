"""The owner client: a member who asks a running swarm who belongs to it, and hands it the owner's revocations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swarmnode.errors import NetworkDown, UsageError
from swarmnode.net.interfaces import PeerId
from swarmnode.platform import MACHINE, Platform
from swarmnode.roles.host import Host, HostConfig, state_name
from swarmnode.roles.membership.access_control import AccessControl
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.certificate import Member
from swarmnode.swarm.records.manifest import OPEN, PRIVATE
from swarmnode.swarm.storage.swarmfile import Swarm

JOIN_S = 15.0
MIN_END_CHARS = 6


class OwnerClient:
    """Made by `join`, ended by `close`."""

    def __init__(self, host: Host, access_control: AccessControl) -> None:
        self._host = host
        self._access_control = access_control

    def __repr__(self) -> str:
        return f"<OwnerClient {self._host!r}>"

    @classmethod
    async def join(
        cls, swarm: Swarm, home: Path, *, patience_s: float = JOIN_S, platform: Platform = MACHINE
    ) -> OwnerClient:
        """Join as a client, and learn what the swarm knows of its members. Raises NetworkDown, NotAdmitted, UsageError."""
        if not swarm.owner:
            raise UsageError(f"{swarm.name} has no owner: everybody may join, and nobody can be revoked")
        host = await Host.join(swarm, HostConfig(home, looks_on=True), role="client", platform=platform)
        assert host.access_control is not None
        try:
            await host.wait_joined(patience_s)
            await host.access_control.exchange()
            await host.directory.refresh()
        except BaseException:
            await host.close()
            raise
        return cls(host, host.access_control)

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
        members = self.picture()["members"]
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
        """Hand the owner's next list to the swarm; how many peers were told. Raises NetworkDown where none was."""
        told = await self._access_control.publish(revocations, self._host.directory.peers())
        if not told:
            raise NetworkDown("no peer of the swarm took the list; it spreads when a node of yours runs with this file")
        return told

    def picture(self) -> dict[str, Any]:
        """As `swarmnode members --json` prints it: members, how often each limited invite was used, and revocations. Members are
        those that have announced themselves or used a limited invite: nobody keeps a list of those who only ask."""
        membership = self._access_control.membership
        announced = self._host.directory.peers()
        certified = {member.peer: member for member in membership.members(self._host.clock.unix())}
        certified.pop(self._host.peer_id, None)
        return {
            "swarm": membership.swarm.hex(),
            "name": self._host.swarm.name,
            "membership": PRIVATE if membership.private else OPEN,
            "members": [
                {"peer": peer, **_seen(announced.get(peer)), **_certified(certified.get(peer))}
                for peer in sorted({*announced, *certified})
            ],
            "uses": {use.member.invite.hex(): membership.uses.count(use.member.invite) for use in membership.uses},
            "revocations": {
                "number": membership.revocations.number,
                "peers": len(membership.revocations.peers),
                "invites": [invite.hex() for invite in membership.revocations.invites],
            },
        }


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
