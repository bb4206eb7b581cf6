"""Checks of a machine's internet connection: its clock, the kind of its NAT, and port mapping by the router."""

from __future__ import annotations

import ipaddress
import socket
import struct
import time
from collections.abc import Callable, Sequence

from swarmnode.examination.machine import Finding, Verdict
from swarmnode.net.addressing.probe import seen_at

ANSWER_S = 2.0
TIME_SERVERS = (("pool.ntp.org", 123), ("time.cloudflare.com", 123))
STUN_SERVERS = (("stun.cloudflare.com", 3478), ("stun.l.google.com", 19302))
ROUTERS = ("239.255.255.250", 1900)  # multicast address of UPnP devices on the local network
CARRIERS = ipaddress.ip_network("100.64.0.0/10")  # between a provider's NAT and its customers (RFC 6598)
SKEW_S, MOST_SKEW_S = 1.0, 3.0  # announcements are signed with times: peers reject those of a clock that is far off
NTP_EPOCH_S = 2_208_988_800  # Unix time 0 in NTP's seconds
SEARCH = (
    b'M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: "ssdp:discover"\r\nMX: 1\r\n'
    b"ST: urn:schemas-upnp-org:device:InternetGatewayDevice:1\r\n\r\n"
)

Server = tuple[str, int]


def examine_network() -> list[Finding]:
    """Run all checks of the connection, in some seconds. Changes nothing, neither here nor at the router."""
    looks: tuple[Callable[[], Finding], ...] = (clock, nat, upnp)
    return [look() for look in looks]


def clock(servers: Sequence[Server] = TIME_SERVERS) -> Finding:
    """Compare this machine's clock with the first of the time `servers` that answers (SNTP, RFC 4330). It is doubtful if
    none answers."""
    skew_s = next((skew for server in servers if (skew := _skew_s(server)) is not None), None)
    if skew_s is None:
        return Finding(
            "clock", "doubtful", "no time server answers", "is this machine online? Compare its clock by hand"
        )
    seen = f"{abs(skew_s):.2f} s {'behind' if skew_s > 0 else 'ahead'}"
    if abs(skew_s) < SKEW_S:
        return Finding("clock", "good", seen)
    verdict: Verdict = "bad" if abs(skew_s) > MOST_SKEW_S else "doubtful"
    return Finding("clock", verdict, seen, "let the system set its clock: timedatectl set-ntp true")


def _skew_s(server: Server) -> float | None:
    """Return how many seconds the server's clock is ahead of this machine's, or None if it does not answer or has no time.

    The answer is taken to have been given in the middle of the wait.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.settimeout(ANSWER_S)
        asked_s = time.time()
        try:
            port.sendto(b"\x23" + bytes(47), server)  # version 4, client
            answer, _sender = port.recvfrom(512)
        except OSError:
            return None
        heard_s = time.time()
    if len(answer) < 48 or not any(answer[40:44]):
        return None
    seconds, fraction = struct.unpack_from(">II", answer, 40)
    return float(seconds - NTP_EPOCH_S + fraction / 2**32 - (asked_s + heard_s) / 2)


def nat(servers: Sequence[Server] = STUN_SERVERS) -> Finding:
    """Determine the kind of NAT: whether several STUN `servers` see one socket at the same address (cone NAT, hole punching
    works) or at different ones."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("", 0))
        seen = [address for server in servers if (address := seen_at(port, server, ANSWER_S)) is not None]
        own = port.getsockname()[1]
    if not seen:
        return Finding("NAT", "doubtful", "no STUN server answers", "UDP is barred here, or this machine is offline")
    host = _own_host(servers[0])
    if host is not None and seen[0][0] == host:
        return Finding("NAT", "good", f"none: this machine is {host} itself")
    carrier = ", behind a provider's NAT" if host and ipaddress.ip_address(host) in CARRIERS else ""
    if len(set(seen)) > 1:
        remedy = "others reach it over relays; --nat, or a forwarded port with --announce-maddr, does better"
        return Finding("NAT", "doubtful", f"symmetric{carrier}: seen at {len(set(seen))} addresses", remedy)
    if len(seen) == 1:
        return Finding(
            "NAT", "doubtful", f"seen at {seen[0][0]}{carrier}", "one STUN server answers; its kind takes two"
        )
    kept = ", ports are kept" if seen[0][1] == own else ""
    return Finding(
        "NAT", "good", f"cone{carrier}, seen at {seen[0][0]}{kept}: other machines can connect through your router"
    )


def _own_host(towards: Server) -> str | None:
    """Return the address that this machine uses towards a server, or None if there is no route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        try:
            port.connect(towards)
        except OSError:
            return None
        return str(port.getsockname()[0])


def upnp(routers: Server = ROUTERS) -> Finding:
    """Return whether a router on this network says that it maps ports. Without an answer the verdict is good: --nat has no
    effect."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.settimeout(ANSWER_S)
        try:
            port.sendto(SEARCH, routers)
            answer, sender = port.recvfrom(2048)
        except OSError:
            return Finding("UPnP", "good", "no router answers: --nat would change nothing")
    if not answer.startswith(b"HTTP/1.1 200"):
        return Finding(
            "UPnP", "doubtful", f"{sender[0]} gives an answer that swarmnode does not know", "leave --nat alone"
        )
    return Finding("UPnP", "good", f"the router at {sender[0]} maps ports: --nat lets others in directly")
