"""A peer's network settings, for any network; and the gate, which decides which peers this peer speaks with.

`Gate` is that of an open swarm; `membership/access_control.py` has the one for members. Every link of every protocol passes it on
both sides, and so does every call of the table.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from swarmnode.codec.body import Body
from swarmnode.codec.messages import Hello
from swarmnode.errors import ErrorCode
from swarmnode.net.interfaces import Network, PeerId, RecordValidator
from swarmnode.net.tasks import Supervisor

LOOPBACK_ANY_PORT = "/ip4/127.0.0.1/tcp/0"


class GuardedLink(Protocol):
    """Interface to a link (`links/link.py`): the members that a gate uses."""

    peer: PeerId
    closed: bool  # true if nothing more can be sent

    def send(self, body: Body) -> None:
        """Queue a message to the peer. Raises PeerLost if the link is closed."""

    async def drain(self) -> None:
        """Wait until the send queue is short. Raises PeerLost if the link died meanwhile."""

    def cut(self, code: ErrorCode) -> None:
        """Refuse the peer with `code`, and end the link."""


class Gate:
    """Gate that admits every peer and shows no certificate."""

    guards_table = False  # whether calls of the table must be admitted, too

    def greeting(self, hello: Hello) -> Hello:
        """Return the greeting to send, with this peer's certificate if the swarm needs one."""
        return hello

    def admit(self, peer: PeerId, protocol: str, theirs: Hello, *, answers: bool) -> None:
        """Admit a peer by its greeting `theirs`. `answers`: this peer opened the link, and the other will serve it. Raises
        ProtocolError if it is refused."""

    def opened(self, link: GuardedLink) -> None:
        """Take note of a link that was admitted; does nothing here."""

    def closed(self, link: GuardedLink) -> None:
        """Note the end of a link. Also called for a link that was never admitted, and more than once."""

    def accept_revocations(self, link: GuardedLink, number: int, revocations: bytes) -> None:
        """Take the `number` of the peer's revocation list, or the list itself (`revocations`, else empty). Raises ProtocolError if
        it is not the owner's."""

    def may_feed(self, peer: PeerId) -> bool:
        """Return whether the peer may feed a training."""
        return True

    def may_lead(self, peer: PeerId, stages: Iterable[PeerId]) -> bool:
        """Return whether the peer may lead a training that has these stages."""
        return True

    # -- the table

    def admits(self, peer: PeerId) -> bool:
        """Return whether this peer answers calls of `peer` to the DHT."""
        return True

    async def introduce(self, peer: PeerId, *, anew: bool = False) -> None:
        """Make sure that the peer answers this peer's calls of the table; `anew` if it has forgotten this peer. Raises PeerError,
        NetworkDown."""


OPEN_GATE = Gate()


@dataclass(frozen=True)
class NetworkConfig:
    """A peer's network settings. Addresses are multiaddrs, those of `relays` end with /p2p/ and an id. The identity file must
    exist."""

    identity_path: Path
    host_maddrs: tuple[str, ...] = (LOOPBACK_ANY_PORT,)
    announce_maddrs: tuple[str, ...] = ()  # addresses at which others reach this peer, given by the user
    relays: tuple[str, ...] = ()  # peers that may relay to this one if it cannot be reached directly
    public: bool = False  # a bootstrap peer, which others reach for sure
    client_mode: bool = False  # uses the DHT without being a part of it
    nat_port_map: bool = False
    direct: bool = True  # use direct TCP connections to peers that accept them
    record_validator: RecordValidator | None = None
    gate: Gate = OPEN_GATE
    unix: Callable[[], float] = time.time  # clock for the expiry of records, in unix seconds
    supervisor: Supervisor = field(default_factory=Supervisor)


StartNetwork = Callable[[NetworkConfig], Awaitable[Network]]
"""Function that brings a peer onto a network. Raises LocalError if this machine cannot."""
