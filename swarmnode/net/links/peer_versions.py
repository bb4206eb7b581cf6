"""Peer versions: the newest protocol that the peers of late speak, so that a node learns that it has grown old.

Its owner is told to renew it, which many invented peers must not bring about: an address group has one voice."""

from __future__ import annotations

from collections import OrderedDict

from swarmnode.codec.messages import VERSION, Hello
from swarmnode.net.limits.address_group import Claimant, owner_of

PEERS_KEPT = 256
FEWEST = 2  # what one peer says never decides


class PeerVersions:
    """Of all the node's links. Who greeted longest ago is forgotten first."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str, int] = OrderedDict()

    def __repr__(self) -> str:
        return f"<PeerVersions of {len(self._newest)} peers>"

    def __len__(self) -> int:
        return len(self._newest)

    def greeted(self, by: Claimant, hello: Hello) -> None:
        """A peer has said what it speaks."""
        whose = owner_of(by)
        self._newest[whose] = hello.spoken[1]
        self._newest.move_to_end(whose)
        if len(self._newest) > PEERS_KEPT:
            self._newest.popitem(last=False)

    @property
    def newer(self) -> int | None:
        """The version, newer than ours, that more than half of the peers speak at least; None while this is up to date."""
        ranked = sorted(self._newest.values(), reverse=True)
        if len(ranked) < FEWEST:
            return None
        most = ranked[len(ranked) // 2]
        return most if most > VERSION else None
