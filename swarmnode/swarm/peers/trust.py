"""Trust: which peers a client lets compute for it.

12D3KooW…, or its end       one peer
group:berlin                members for whom the owner vouches so, in a private swarm
net:203.0.113.0/24          peers all of whose announced addresses lie there; what a peer says of itself, and no proof
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Union

from swarmnode.errors import UsageError
from swarmnode.net.addressing.addresses import ip_of
from swarmnode.swarm.records.announcement import Announcement

MIN_END_CHARS = 8
GROUP = "group:"
NETWORK = "net:"
IpNetwork = Union[ipaddress.IPv4Network, ipaddress.IPv6Network]


@dataclass(frozen=True)
class Trust:
    """Peers that are trusted for any one of these reasons. An empty one trusts everybody."""

    peers: tuple[str, ...] = ()  # ids, or their ends
    groups: tuple[str, ...] = ()
    networks: tuple[IpNetwork, ...] = ()

    def __repr__(self) -> str:
        words = [*self.peers, *(GROUP + group for group in self.groups), *(f"{NETWORK}{net}" for net in self.networks)]
        return f"<Trust in {', '.join(words) or 'everybody'}>"

    def covers(self, announcement: Announcement, group: str = "") -> bool:
        """Whether the peer that announces this may compute; `group` is what its certificate says."""
        return (
            self == EVERYBODY
            or any(announcement.peer.endswith(peer) for peer in self.peers)
            or (bool(group) and group in self.groups)
            or any(_lies_in(announcement, network) for network in self.networks)
        )


EVERYBODY = Trust()


def parse_trust(words: Iterable[str]) -> Trust:
    """What `--trust` was given. Raises UsageError."""
    peers, groups, networks = [], [], []
    for word in words:
        if word.startswith(GROUP):
            groups.append(word.removeprefix(GROUP))
        elif word.startswith(NETWORK):
            networks.append(_network(word.removeprefix(NETWORK)))
        elif len(word) >= MIN_END_CHARS and word.isalnum():
            peers.append(word)
        else:
            raise UsageError(
                f"{word!r} names nobody to trust; give a peer's id or at least its last {MIN_END_CHARS} characters, "
                "group:NAME or net:203.0.113.0/24"
            )
    return Trust(tuple(peers), tuple(groups), tuple(networks))


def _network(text: str) -> IpNetwork:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise UsageError(f"{text!r} is not a network like 203.0.113.0/24: {error}") from None


def _lies_in(announcement: Announcement, network: IpNetwork) -> bool:
    hosts = [ip_of(address) for address in announcement.addresses]
    return bool(hosts) and all(host is not None and host in network for host in hosts)
