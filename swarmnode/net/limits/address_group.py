"""Address groups: peers that are likely one and the same party, however many peer ids it has.

On the open internet a group is a /24 or a /48, the range that one customer gets; in a private network it is a single address.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.addressing.addresses import host_of, ip_of, is_relayed
from swarmnode.net.interfaces import PeerId

IPV4_BITS, IPV6_BITS = 24, 48
IPV6_HOME_BITS = 64
RELAYED = " relayed"


class Claimant(NamedTuple):
    """Party that a limit counts for. `group` is the group of the peer's address; the peer's id if the address is unknown."""

    group: str
    peer: PeerId


def address_group(address: str) -> str:
    """Return the group of a multiaddr: a network, an address or a host name. Addresses over a relay share the relay's group."""
    host, ip = host_of(address) or "", ip_of(address)
    if ip is None:
        return host
    if ip.is_global:
        host = str(ipaddress.ip_network((ip, IPV4_BITS if ip.version == 4 else IPV6_BITS), strict=False))
    return f"{host}{RELAYED}" if is_relayed(address) else host


def is_relayed_group(group: str) -> bool:
    """Return whether a group is that of a relay's address, behind which homes have nothing in common."""
    return group.endswith(RELAYED)


def is_wide(group: str) -> bool:
    """Return whether a group is one of the open internet: its peers should not be the only ones asked or believed."""
    return "/" in group


@lru_cache(maxsize=4096)
def wide_group(addresses: tuple[str, ...]) -> str:
    """Return the first group of the open internet among the multiaddrs of a peer; empty if there is none. Relayed addresses do not
    count: homes behind one relay have nothing in common."""
    groups = (address_group(address) for address in addresses if not is_relayed(address))
    return next(filter(is_wide, groups), "")


@lru_cache(maxsize=4096)
def home_of(addresses: tuple[str, ...]) -> str:
    """Return the public address among a peer's multiaddrs, which all machines at home share with their line; of IPv6 the home's
    /64. Empty if there is none."""
    ips = (ip_of(address) for address in addresses if not is_relayed(address))
    ip = next((one for one in ips if one is not None and one.is_global), None)
    if ip is None:
        return ""
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, IPV6_HOME_BITS), strict=False))


def owner_of(claimant: Claimant) -> str:
    """Return the name to count under if only one name counts: the group on the open internet, else the peer."""
    return claimant.group if is_wide(claimant.group) else claimant.peer
