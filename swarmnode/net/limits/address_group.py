"""Address groups: who is likely one and the same, however many peer ids it has.

Of the open internet a /24 or a /48, which is what one customer gets; of a private network every address for itself.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import NamedTuple

from swarmnode.net.addressing.addresses import host_of, ip_of, is_relayed
from swarmnode.net.interfaces import PeerId

IPV4_BITS, IPV6_BITS = 24, 48
IPV6_HOME_BITS = 64


class Claimant(NamedTuple):
    """Whom a limit counts something for. `group` is that of the peer's address; its id where the address is not known."""

    group: str
    peer: PeerId


def address_group(address: str) -> str:
    """The group of a multiaddr. Who comes over a relay is of the relay's."""
    host, ip = host_of(address) or "", ip_of(address)
    if ip is None:
        return host
    if ip.is_global:
        host = str(ipaddress.ip_network((ip, IPV4_BITS if ip.version == 4 else IPV6_BITS), strict=False))
    return f"{host} relayed" if is_relayed(address) else host


def is_wide(group: str) -> bool:
    """Whether a group is one of the open internet: its peers should not be all that is asked, or all that is believed."""
    return "/" in group


@lru_cache(maxsize=4096)
def wide_group(addresses: tuple[str, ...]) -> str:
    """The group of the open internet in which somebody with these multiaddrs is; empty where in none. Homes behind one relay have
    nothing in common."""
    groups = (address_group(address) for address in addresses if not is_relayed(address))
    return next(filter(is_wide, groups), "")


@lru_cache(maxsize=4096)
def home_of(addresses: tuple[str, ...]) -> str:
    """The address on the open internet of somebody with these multiaddrs, which all at home share, and with it the line; of IPv6
    the /64 that a home has. Empty where none is known."""
    ips = (ip_of(address) for address in addresses if not is_relayed(address))
    ip = next((one for one in ips if one is not None and one.is_global), None)
    if ip is None:
        return ""
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, IPV6_HOME_BITS), strict=False))


def owner_of(claimant: Claimant) -> str:
    """Whose something is where only one name counts: the group's on the open internet, else the peer's."""
    return claimant.group if is_wide(claimant.group) else claimant.peer
