"""How others get to this peer, concluded from the addresses that libp2p gives it and from who came in.

libp2p offers an address over a relay only where nobody gets in directly: its own dial-back test (AutoNAT) found that, or we
knew it (`is_hidden`). A direct connection from outside that comes about nevertheless went through a hole (DCUtR).
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import psutil

from swarmnode.net.addressing.addresses import host_of, is_public, is_relayed


class Reachability(IntEnum):
    """How others get to a peer (`protocol/records.md`). A reader treats a value that it does not know as UNKNOWN."""

    UNKNOWN = 0
    PUBLIC = 1  # at an address of its own
    MAPPED = 2  # through a port that its router maps
    PUNCHED = 3  # through a hole punched with a relay's help
    RELAYED = 4  # through a relay only


@dataclass(frozen=True)
class Evidence:
    """What is known here. `addresses` are those that libp2p gives us; `interfaces` the IP addresses of this machine.

    `promised` are addresses that the user told us to announce. `visitors` are remote addresses of connected peers that
    nobody here has dialled.
    """

    addresses: Sequence[str] = ()
    interfaces: Collection[str] = ()
    promised: Sequence[str] = ()
    visitors: Sequence[str] = ()

    @property
    def direct(self) -> list[str]:
        """Addresses of the internet, without relay."""
        return [address for address in self.addresses if not is_relayed(address) and is_public(address)]

    @property
    def own(self) -> list[str]:
        """Of those, the ones that this machine has itself."""
        return [address for address in self.direct if host_of(address) in self.interfaces]

    @property
    def relayed(self) -> list[str]:
        """Addresses over a relay."""
        return [address for address in self.addresses if is_relayed(address)]

    @property
    def came_in(self) -> list[str]:
        """Who came in from the internet without a relay."""
        return [address for address in self.visitors if is_public(address) and not is_relayed(address)]

    def told(self) -> tuple[str, ...]:
        """The same in sentences."""
        return (
            f"libp2p gives {len(self.addresses)} addresses: {len(self.direct)} of the internet, {len(self.relayed)} over a relay",
            f"{len(self.own)} of those of the internet are this machine's own, the others its router's",
            f"its owner announces {', '.join(self.promised) or 'none besides'}",
            f"{len(self.came_in)} peers came in from the internet that nobody here has dialled",
        )


def conclude(evidence: Evidence) -> Reachability:
    """The reachability that the evidence speaks for."""
    if evidence.own:
        return Reachability.PUBLIC
    if any(is_public(address) for address in evidence.promised):
        return Reachability.MAPPED
    if evidence.relayed:
        return Reachability.PUNCHED if evidence.came_in else Reachability.RELAYED
    if (
        evidence.direct
    ):  # the router's address: libp2p tells it once the router mapped a port, or several peers saw us there
        return Reachability.MAPPED
    return Reachability.UNKNOWN


def is_hidden(listening: Sequence[str], interfaces: Collection[str]) -> bool:
    """Whether none of the addresses at which a peer listens is the internet's, so that only a router's mapping lets others in.

    Who knows that says it at once. libp2p takes 15 s and more to find it out, and meanwhile tells others the address at which
    its router was seen. Their calls to it are lost, but leave half-open entries in the routers of both sides, and for
    the two minutes that Linux keeps those no hole can be punched.
    """
    return not any(is_public(f"/ip{6 if ':' in host else 4}/{host}") for host in _hosts(listening, interfaces))


def _hosts(listening: Sequence[str], interfaces: Collection[str]) -> Iterator[str]:
    """The IP addresses behind what is listened on."""
    for address in listening:
        host = host_of(address)
        if host == "0.0.0.0":  # nosec B104  # compared with
            yield from (each for each in interfaces if ":" not in each)
        elif host == "::":
            yield from interfaces  # Linux takes IPv4 there, too
        elif host is not None:
            yield host


def own_interfaces() -> set[str]:
    """The IP addresses of this machine."""
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    families = (socket.AF_INET, socket.AF_INET6)
    return {entry.address.partition("%")[0] for entry in entries if entry.family in families}
