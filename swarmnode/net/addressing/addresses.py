"""Multiaddrs as strings; parsed and checked by py-multiaddr in this file only.

Address groups: peers that are likely one and the same party, however many peer ids it has.

On the open internet a group is a /24 or a /48, the range that one customer gets; in a private network it is a single address.
"""

from __future__ import annotations

import ipaddress
import itertools
import re
import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarmnode.errors import LocalError, UsageError, with_port_advice
from swarmnode.net.interfaces import PeerId

# "This network", and the reserved range with the broadcast address.
_OF_NOBODY = tuple(map(ipaddress.ip_network, ("0.0.0.0/8", "240.0.0.0/4")))


def check(address: str, *, needs_peer: bool = False) -> str:
    """Return the address in normal form. Raises UsageError if it is no multiaddr, or if `needs_peer` and it does not end with /p2p/
    and an id."""
    try:
        parsed = Multiaddr(address)
        if not address:
            raise ValueError("it is empty")
    except (MultiaddrError, ValueError) as error:
        raise UsageError(f"{address!r} is not a multiaddr like /ip4/203.0.113.7/tcp/4001: {error}") from None
    if needs_peer and peer_of(address) is None:
        raise UsageError(f"{address!r} must end with /p2p/ and a peer id")
    return str(parsed)


def check_all(
    option: str, addresses: Sequence[str], *, needs_peer: bool = False, dialled: bool = False
) -> tuple[str, ...]:
    """Return the addresses that the user gave for `option`, in normal form.

    Raises UsageError if one is no multiaddr, is no address of a single machine (a wildcard is fine for listening only), or, with
    `needs_peer`, lacks its /p2p/ part or a port. `dialled`: other peers will dial the addresses.
    """
    try:
        checked = tuple(check(address, needs_peer=needs_peer) for address in addresses)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    for address in checked:
        if not is_of_one_machine(address) and (dialled or needs_peer or not is_wildcard(address)):
            raise UsageError(
                f"{option} {address}: peers cannot dial {host_of(address)}; give the address that others reach"
            )
        if needs_peer and host_of(address) is not None and not port_of(address):
            raise UsageError(f"{option} {address}: it names no port to dial, like /ip4/203.0.113.7/tcp/4001/p2p/…")
    return checked


def _value(address: str, *protocols: str) -> str | None:
    """Return the value of the first component of the address with one of these protocols; None if it has none."""
    parts = address.strip("/").split("/")
    for name, value in itertools.pairwise(parts):
        if name in protocols:
            return value
    return None


def peer_of(address: str) -> PeerId | None:
    """Return the peer id at the end of the address (the target's, if it goes over a relay); None if it ends otherwise."""
    head, found, tail = address.rpartition("/p2p/")
    return tail if found and head and "/" not in tail else None


def with_peer(address: str, peer: PeerId) -> str:
    """Return the address with /p2p/<peer> at its end."""
    return address if address.endswith(f"/p2p/{peer}") else f"{address.rstrip('/')}/p2p/{peer}"


def without_peer(address: str) -> str:
    """Return the address without the /p2p/ part at its end."""
    peer = peer_of(address)
    return address if peer is None else address.removesuffix(f"/p2p/{peer}")


def of_stranger(announced: Sequence[str], peer: PeerId) -> list[str]:
    """Return those of the addresses `announced`, a stranger's, that can lead to `peer`: TCP at the IP address of one machine,
    without a relay. They have /p2p/ and the peer's id at their ends."""
    good = []
    for address in announced:
        try:
            full = check(with_peer(address, peer), needs_peer=True)
        except UsageError:
            continue
        if full.count("/p2p/") == 1 and tcp_endpoint(full) and is_of_one_machine(full):
            good.append(full)
    return good


def is_loopback(address: str) -> bool:
    """Return whether the address leads to this machine alone."""
    host = _value(address, "ip4", "ip6")
    if host is not None:
        return ipaddress.ip_address(host).is_loopback
    return _value(address, "dns", "dns4", "dns6") == "localhost"


def host_of(address: str) -> str | None:
    """Return the IP address or host name in the address; None if it has neither."""
    return _value(address, "ip4", "ip6", "dns", "dns4", "dns6")


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address in the address; None for a host name, which may come to mean another machine, and for an invalid
    address."""
    try:
        return ipaddress.ip_address(host_of(address) or "")
    except ValueError:
        return None


def with_host(address: str, host: str) -> str:
    """Return the address with another IP address at its beginning."""
    _, _protocol, _host, *rest = address.split("/")
    return "/".join(("", "ip6" if ":" in host else "ip4", host, *rest))


def with_port(address: str, port: int) -> str:
    """Return the address with another port."""
    return re.sub(r"/(tcp|udp)/\d+", rf"/\g<1>/{port}", address, count=1)


def port_of(address: str) -> int | None:
    """Return the port of TCP or QUIC in the address; None if it has none."""
    port = _value(address, "tcp", "udp")
    return int(port) if port is not None and ("/tcp/" in address or "/quic" in address) else None


def is_link_local(address: str) -> bool:
    """Return whether the address is link-local, so that it means another machine on each network."""
    host = _value(address, "ip4", "ip6")
    return host is not None and ipaddress.ip_address(host).is_link_local


def is_wildcard(address: str) -> bool:
    """Return whether the address stands for every interface of a machine: for listening, not for dialling."""
    return host_of(address) in ("0.0.0.0", "::")  # nosec B104  # only compared


def is_of_one_machine(address: str) -> bool:
    """Return whether one machine can have the address: no wildcard, multicast, broadcast or reserved address. True for host
    names."""
    host = _value(address, "ip4", "ip6")
    if host is None:
        return True
    found = ipaddress.ip_address(host)
    return not (found.is_multicast or found.is_unspecified or any(found in network for network in _OF_NOBODY))


def is_public(address: str) -> bool:
    """Return whether the address is on the open internet: a global IP address, or a name other than localhost."""
    host = _value(address, "ip4", "ip6")
    if host is not None:
        return ipaddress.ip_address(host).is_global
    return host_of(address) not in (None, "localhost")


def is_relayed(address: str) -> bool:
    """Return whether the address leads over a relay."""
    return "/p2p-circuit" in address


def tcp_endpoint(address: str) -> tuple[str, int] | None:
    """Return the (IP address, port) of a TCP address; None for other transports and for host names."""
    return tcp_service(address) if _value(address, "ip4", "ip6") is not None else None


def tcp_service(address: str) -> tuple[str, int] | None:
    """Return the (IP address or host name, port) of a TCP address; None for other transports."""
    host, port = host_of(address), _value(address, "tcp")
    return (host, int(port)) if host is not None and port is not None else None


def with_ports(configured: Sequence[str], listening: Sequence[str]) -> tuple[str, ...]:
    """Return the configured addresses with open ports (0) replaced by the ports in the addresses `listening`."""
    filled = []
    for address in configured:
        for transport in ("tcp", "udp"):
            ports = [port for other in listening if (port := _value(other, transport)) is not None]
            if _value(address, transport) == "0" and ports:
                address = address.replace(f"/{transport}/0", f"/{transport}/{ports[0]}", 1)
        filled.append(address)
    return tuple(filled)


def check_port_free(address: str) -> None:
    """Raise LocalError if a program listens on the address already: p2pd would silently share the port. Does nothing if the port
    is 0."""
    endpoint = tcp_endpoint(address)
    if endpoint is None or endpoint[1] == 0:
        return
    try:
        bound(*endpoint).close()
    except OSError as error:
        raise LocalError(f"cannot listen on {address}: {with_port_advice(error, 'choose another port')}") from None


def check_can_listen(option: str, host: str, port: int) -> None:
    """Raise LocalError if `host`, an address or name given for `option`, is not this machine's, or its port is taken."""
    try:
        if not host:
            raise ValueError("it is empty; 0.0.0.0 listens on all interfaces")
        bound(host, port).close()
    except OSError as error:
        reason = with_port_advice(error, "choose another address or port")
        raise LocalError(f"cannot listen at {option} {host}, port {port}: {reason}") from None
    except ValueError as error:  # no host's name
        raise LocalError(f"cannot listen at {option} {host}, port {port}: {error}") from None


def bound(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a TCP socket bound to the address, at a free port if `port` is 0; with a `backlog` it listens. Raises OSError if the
    address cannot be bound."""
    family, kind, protocol, _, endpoint = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT is no listener
        found.bind(endpoint)
        if backlog is not None:
            found.listen(backlog)
    except BaseException:
        found.close()
        raise
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free at the moment."""
    with bound(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port


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
