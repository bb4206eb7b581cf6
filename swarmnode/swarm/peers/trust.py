"""Trust in peers that the user names: conditions on the peers that may compute."""

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
    """Condition on peers: a peer is trusted if any one of these matches. An empty condition trusts every peer."""

    peers: tuple[str, ...] = ()  # peer ids, or their ends
    groups: tuple[str, ...] = ()
    networks: tuple[IpNetwork, ...] = ()

    def __repr__(self) -> str:
        words = [*self.peers, *(GROUP + group for group in self.groups), *(f"{NETWORK}{net}" for net in self.networks)]
        return f"<Trust in {', '.join(words) or 'everybody'}>"

    def covers(self, announcement: Announcement, group: str = "") -> bool:
        """Return whether the peer of this announcement may compute. `group` is the group in its certificate."""
        hosts = [ip_of(address) for address in announcement.addresses]
        return (
            self == EVERYBODY
            or any(announcement.peer.endswith(peer) for peer in self.peers)
            or (bool(group) and group in self.groups)
            or any(hosts and all(host is not None and host in network for host in hosts) for network in self.networks)
        )


EVERYBODY = Trust()


def parse_trust(words: Iterable[str]) -> Trust:
    """Parse the values of `--trust`. Raises UsageError if one is not a peer, group or network."""
    peers, groups, networks = [], [], []
    for word in words:
        if word.startswith(GROUP):
            groups.append(word.removeprefix(GROUP))
        elif word.startswith(NETWORK):
            try:
                networks.append(ipaddress.ip_network(text := word.removeprefix(NETWORK)))
            except ValueError as error:
                raise UsageError(f"{text!r} is not a network like 203.0.113.0/24: {error}") from None
        elif len(word) >= MIN_END_CHARS and word.isalnum():
            peers.append(word)
        else:
            raise UsageError(
                f"{word!r} is not a peer, group or network; give a peer's id or at least its last {MIN_END_CHARS} characters, "
                "group:NAME or net:203.0.113.0/24"
            )
    return Trust(tuple(peers), tuple(groups), tuple(networks))
