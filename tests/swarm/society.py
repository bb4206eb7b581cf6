"""An owner, peers and invites for tests, all drawn from fixed seeds."""

from __future__ import annotations

from swarmnode.net.identity import Identity, SigningKey
from swarmnode.swarm.records.invite import VERSION, Grant, Role, admit_peer, sign_grant
from swarmnode.swarm.records.membership import Membership, RevocationList, nobody, sign_list

SWARM = bytes(range(32))
OWNER = SigningKey(b"o" * 32)
STRANGER = SigningKey(b"s" * 32)
NOW = 1_800_000_000.0
DAY_S = 86_400
HOME, ANOTHER_HOME = SigningKey(b"h" * 32), SigningKey(b"H" * 32)
ALICE, BOB, CAROL = (Identity(name.encode().ljust(32, b".")).peer_id for name in ("alice", "bob", "carol"))


class Ticket:
    """An invite: its grant and its private key."""

    def __init__(
        self,
        name: str = "ticket",
        *,
        role: int = Role.VOLUNTEER,
        expires_at: float = NOW + DAY_S,
        uses: int = 0,
        peer: str = "",
        group: str = "",
        owner: SigningKey = OWNER,
        swarm: bytes = SWARM,
    ) -> None:
        self.key = SigningKey(name.encode().ljust(32, b"."))
        self.value = Grant(VERSION, swarm, self.key.public, role, int(NOW), int(expires_at), uses, peer, group)
        self.grant = sign_grant(self.value, owner)

    @property
    def id(self) -> bytes:
        return self.value.invite_id

    def certificate(self, peer: str, at: float = NOW, *, home: SigningKey | None = None) -> bytes:
        return admit_peer(self.grant, self.key, SWARM, peer, at, home=home)


def private() -> Membership:
    """What a peer knows at first."""
    return Membership(SWARM, OWNER.public, private=True)


def listed(
    *,
    peers: tuple[str, ...] = (),
    invites: tuple[bytes, ...] = (),
    homes: tuple[bytes, ...] = (),
    after: RevocationList | None = None,
) -> bytes:
    """A signed revocation list."""
    return sign_list((after or nobody(SWARM)).extended(NOW, peers=peers, invites=invites, homes=homes), OWNER)
