"""How a peer shows that it belongs: from the invite that it was given to its certificate, and the gate that it keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from swarmnode.errors import NotAdmitted, ProtocolError
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import OnCrash
from swarmnode.roles.membership.access_control import AccessControl
from swarmnode.swarm.records.certificate import admit_peer, open_certificate
from swarmnode.swarm.records.grant import Role
from swarmnode.swarm.records.membership import Membership
from swarmnode.swarm.records.signing_key import SigningKey
from swarmnode.swarm.storage.membership_file import MembershipFile
from swarmnode.swarm.storage.swarmfile import Swarm


def access_control_of(
    swarm: Swarm, peer: PeerId, home: Path, *, needs: Role, clock: Callable[[], float], on_crash: OnCrash | None = None
) -> AccessControl | None:
    """The access control of a peer in a swarm that has an owner; None in one that has none: everybody belongs to it.

    `clock` gives unix time. Raises NotAdmitted where the invite does not make this peer a member, or not one that may do what
    it `needs` to.
    """
    if not swarm.owner:
        return None
    if swarm.private and not swarm.grant:
        raise NotAdmitted(f"the swarm {swarm.name} is private: ask its owner for an invite of your own")
    file = MembershipFile(home / "membership" / f"{swarm.id.hex()[:16]}-{peer[-8:]}.json")
    certificate = b"" if not swarm.grant else _certificate(swarm, peer, file.certificate, clock())
    membership = Membership(swarm.id, swarm.owner, private=swarm.private, certificate=certificate)
    access_control = AccessControl(membership, file, clock=clock, on_crash=on_crash)
    if swarm.revocations:
        with contextlib.suppress(ProtocolError):  # a list that is not the owner's says nothing
            membership.take_list(swarm.revocations)
    access_control.check_welcome(peer, swarm.name, needs)
    membership.admit(peer, certificate, clock())  # we are a member to ourselves
    return access_control


def _certificate(swarm: Swarm, peer: PeerId, earlier: bytes, now: float) -> bytes:
    """The certificate of an earlier run, if it is of the same invite; else a new one."""
    new = admit_peer(swarm.grant, SigningKey(swarm.secret), swarm.id, peer, now)
    try:
        member = open_certificate(new, swarm.id, swarm.owner)
        if earlier and open_certificate(earlier, swarm.id, swarm.owner).invite == member.invite:
            return earlier
    except ProtocolError as error:
        raise NotAdmitted(f"this invite to {swarm.name} does not admit peer {peer}: {error}") from None
    return new
