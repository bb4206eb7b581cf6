"""Multiaddrs, as strings between components: parsed and checked by py-multiaddr here and nowhere else."""

from __future__ import annotations

import ipaddress
import itertools
import re
import socket
from collections.abc import Sequence

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from swarmnode.errors import LocalError, UsageError, with_port_advice
from swarmnode.net.interfaces import PeerId

# This network; reserved, and to all of a network.
_OF_NOBODY = tuple(map(ipaddress.ip_network, ("0.0.0.0/8", "240.0.0.0/4")))


def check(address: str, *, needs_peer: bool = False) -> str:
    """The address, if it is a multiaddr. Raises UsageError where it is not, or lacks the /p2p/ part that it needs."""
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
    """What the user gave for an option; `dialled`: others shall call there, so that wildcards mean nothing. Raises UsageError."""
    try:
        checked = tuple(check(address, needs_peer=needs_peer) for address in addresses)
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None
    for address in checked:
        if not is_of_one_machine(address) and (dialled or needs_peer or not is_wildcard(address)):
            raise UsageError(
                f"{option} {address}: nobody can dial {host_of(address)}; give the address that others reach"
            )
        if needs_peer and host_of(address) is not None and not port_of(address):
            raise UsageError(f"{option} {address}: it names no port to dial, like /ip4/203.0.113.7/tcp/4001/p2p/…")
    return checked


def _value(address: str, *protocols: str) -> str | None:
    """The value of the first of these protocols that the address has."""
    parts = address.strip("/").split("/")
    for name, value in itertools.pairwise(parts):
        if name in protocols:
            return value
    return None


def peer_of(address: str) -> PeerId | None:
    """The peer id that the address ends with (the target's, where it goes over a relay)."""
    head, found, tail = address.rpartition("/p2p/")
    return tail if found and head and "/" not in tail else None


def with_peer(address: str, peer: PeerId) -> str:
    """The address with /p2p/<peer> at its end."""
    return address if address.endswith(f"/p2p/{peer}") else f"{address.rstrip('/')}/p2p/{peer}"


def without_peer(address: str) -> str:
    """The address without the /p2p/ part at its end."""
    peer = peer_of(address)
    return address if peer is None else address.removesuffix(f"/p2p/{peer}")


def is_loopback(address: str) -> bool:
    """Whether the address leads to this machine alone."""
    host = _value(address, "ip4", "ip6")
    if host is not None:
        return ipaddress.ip_address(host).is_loopback
    return _value(address, "dns", "dns4", "dns6") == "localhost"


def host_of(address: str) -> str | None:
    """The IP address or name at which it begins."""
    return _value(address, "ip4", "ip6", "dns", "dns4", "dns6")


def ip_of(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address at which it begins; None for a name, since whose that is may change, and for what is no address."""
    try:
        return ipaddress.ip_address(host_of(address) or "")
    except ValueError:
        return None


def with_host(address: str, host: str) -> str:
    """The address with another IP address at its beginning."""
    _, _protocol, _host, *rest = address.split("/")
    return "/".join(("", "ip6" if ":" in host else "ip4", host, *rest))


def with_port(address: str, port: int) -> str:
    """The address with another port."""
    return re.sub(r"/(tcp|udp)/\d+", rf"/\g<1>/{port}", address, count=1)


def port_of(address: str) -> int | None:
    """The port that it names, where connections can be taken there: of TCP, or of QUIC's UDP."""
    port = _value(address, "tcp", "udp")
    return int(port) if port is not None and ("/tcp/" in address or "/quic" in address) else None


def is_link_local(address: str) -> bool:
    """Whether the address means another machine on each network."""
    host = _value(address, "ip4", "ip6")
    return host is not None and ipaddress.ip_address(host).is_link_local


def is_wildcard(address: str) -> bool:
    """Whether the address stands for every interface of a machine: to be listened on, not to be dialled."""
    return host_of(address) in ("0.0.0.0", "::")  # nosec B104  # compared with


def is_of_one_machine(address: str) -> bool:
    """Whether one machine can have the address: no wildcard, and none of a group, of all, or of nobody. Names may lead anywhere."""
    host = _value(address, "ip4", "ip6")
    if host is None:
        return True
    found = ipaddress.ip_address(host)
    return not (found.is_multicast or found.is_unspecified or any(found in network for network in _OF_NOBODY))


def is_public(address: str) -> bool:
    """Whether the address is one of the open internet: a global IP address, or a name."""
    host = _value(address, "ip4", "ip6")
    if host is not None:
        return ipaddress.ip_address(host).is_global
    return host_of(address) not in (None, "localhost")


def is_relayed(address: str) -> bool:
    """Whether the address leads over a relay."""
    return "/p2p-circuit" in address


def tcp_endpoint(address: str) -> tuple[str, int] | None:
    """(host, port) of an ip4 or ip6 TCP address; None for others."""
    return tcp_service(address) if _value(address, "ip4", "ip6") is not None else None


def tcp_service(address: str) -> tuple[str, int] | None:
    """(host or name, port) at which its TCP connections are taken; None for other transports."""
    host, port = host_of(address), _value(address, "tcp")
    return (host, int(port)) if host is not None and port is not None else None


def with_ports(configured: Sequence[str], listening: Sequence[str]) -> tuple[str, ...]:
    """The configured addresses, ports that were left open (0) replaced by those that are listened on now."""
    filled = []
    for address in configured:
        for transport in ("tcp", "udp"):
            ports = [port for other in listening if (port := _value(other, transport)) is not None]
            if _value(address, transport) == "0" and ports:
                address = address.replace(f"/{transport}/0", f"/{transport}/{ports[0]}", 1)
        filled.append(address)
    return tuple(filled)


def check_port_free(address: str) -> None:
    """Raise LocalError where somebody listens on the address already: p2pd would silently share the port."""
    endpoint = tcp_endpoint(address)
    if endpoint is None or endpoint[1] == 0:
        return
    try:
        bound(*endpoint).close()
    except OSError as error:
        raise LocalError(f"cannot listen on {address}: {with_port_advice(error, 'choose another port')}") from None


def check_can_listen(option: str, host: str, port: int) -> None:
    """Raise LocalError where `host`, an address or name of `option`, is none of this machine's, or its port is taken."""
    try:
        if not host:
            raise ValueError("it is empty; say 0.0.0.0 where everybody is meant")
        bound(host, port).close()
    except OSError as error:
        reason = with_port_advice(error, "choose another address or port")
        raise LocalError(f"cannot listen at {option} {host}, port {port}: {reason}") from None
    except ValueError as error:  # what cannot be a host's name
        raise LocalError(f"cannot listen at {option} {host}, port {port}: {error}") from None


def bound(host: str, port: int, *, backlog: int | None = None) -> socket.socket:
    """Return a TCP socket that has this address, at a free port if `port` is 0; with a `backlog` it listens. Raises OSError if the
    address cannot be had."""
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
    """Return a TCP port that nobody listens on at the moment."""
    with bound(host, 0) as probe:
        port: int = probe.getsockname()[1]
        return port
