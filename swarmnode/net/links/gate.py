"""The gate: whom this peer speaks with. The base is that of an open swarm; of members: `membership/access_control.py`.

Every link of every protocol passes it on both sides, and every call of the table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from swarmnode.codec.body import Body
from swarmnode.codec.messages import Hello
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import PeerId


class GuardedLink(Protocol):
    """What a gate sees of a link (`link.py`)."""

    peer: PeerId
    closed: bool  # whether nothing can be sent any more

    def send(self, body: Body) -> None:
        """Queue a frame. Raises PeerLost on a closed link."""

    async def drain(self) -> None:
        """Wait until the send queue is short. Raises PeerLost where the link died meanwhile."""

    def cut(self, code: ErrorCode) -> None:
        """Refuse the peer, and end the link."""


class Gate:
    """Admits everybody, and shows nothing."""

    guards_table = False  # whether calls of the table must be let through, too

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def greeting(self, hello: Hello) -> Hello:
        """What we greet with."""
        return hello

    def admit(self, peer: PeerId, protocol: str, theirs: Hello, *, answers: bool) -> None:
        """Let a peer in that greeted; `answers` where we opened the link and it is to serve us. Raises ProtocolError."""

    def opened(self, link: GuardedLink) -> None:
        """A link has passed."""

    def closed(self, link: GuardedLink) -> None:
        """A link is over. Also called for one that never passed, and more than once."""

    def heard(self, link: GuardedLink, number: int, revocations: bytes) -> None:
        """The peer told of a revocation list, or sent it. Raises ProtocolError where it is false."""

    def may_feed(self, peer: PeerId) -> bool:
        """Whether the peer may feed a training."""
        return True

    def may_lead(self, peer: PeerId, stages: Iterable[PeerId]) -> bool:
        """Whether the peer may lead a training that has these stages."""
        return True

    # -- the table

    def admits(self, peer: PeerId) -> bool:
        """Whether calls of a peer are answered."""
        return True

    async def introduce(self, peer: PeerId, *, anew: bool = False) -> None:
        """Make sure that the peer will answer our calls; `anew` where it has forgotten us. Raises PeerError, NetworkDown."""


OPEN_GATE = Gate()
