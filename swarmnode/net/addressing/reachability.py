"""Reachability of this peer, concluded from the addresses that libp2p gives it and from the peers that connected to it.

libp2p offers an address over a relay only if the peer cannot be reached directly: its own dial-back test (AutoNAT) found that, or
swarmnode knew it (`is_hidden`). A direct connection from outside then went through a punched hole (DCUtR).

Probes of addresses: whether a peer accepts a connection there, and at which address a STUN server sees this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import psutil

from swarmnode.counting import counted
from swarmnode.net.addressing.addresses import host_of, is_public, is_relayed, tcp_service


class Reachability(IntEnum):
    """Kind of access that others have to a peer (`protocol/records.md`). A reader treats an unknown value as UNKNOWN."""

    UNKNOWN = 0
    PUBLIC = 1  # at an address of its own
    MAPPED = 2  # through a port that its router maps
    PUNCHED = 3  # through a hole punched with a relay's help
    RELAYED = 4  # through a relay only

    @property
    def in_words(self) -> str:
        """Sentence about the machine, for its owner."""
        return REACHED[self]


REACHED = {
    Reachability.UNKNOWN: "it is not known whether others can reach this machine",
    Reachability.PUBLIC: "others reach this machine directly",
    Reachability.MAPPED: "others reach this machine through a mapped port of the router",
    Reachability.PUNCHED: "others reach this machine through holes punched in the router",
    Reachability.RELAYED: "others reach this machine over a relay only",
}


@dataclass(frozen=True)
class Evidence:
    """Facts about this peer's reachability.

    `addresses` are those that libp2p gives it; `interfaces` are the IP addresses of this machine. `promised` are the addresses that
    the user announces. `visitors` are the remote addresses of connected peers that this peer did not dial.
    """

    addresses: Sequence[str] = ()
    interfaces: Collection[str] = ()
    promised: Sequence[str] = ()
    visitors: Sequence[str] = ()

    @property
    def direct(self) -> list[str]:
        """Public addresses of this peer that need no relay."""
        return [address for address in self.addresses if not is_relayed(address) and is_public(address)]

    @property
    def own(self) -> list[str]:
        """Public addresses of this peer whose IP address is one of this machine's interfaces."""
        return [address for address in self.direct if host_of(address) in self.interfaces]

    @property
    def relayed(self) -> list[str]:
        """Addresses of this peer that lead over a relay."""
        return [address for address in self.addresses if is_relayed(address)]

    @property
    def came_in(self) -> list[str]:
        """Remote addresses of peers that connected from the internet without a relay."""
        return [address for address in self.visitors if is_public(address) and not is_relayed(address)]

    def sentences(self) -> tuple[str, ...]:
        """Return the evidence as sentences for a user."""
        return (
            f"it has {counted(len(self.direct), 'address')} on the internet ({len(self.own)} its own, the others its router's)",
            f"relays of the swarm give it {counted(len(self.relayed), 'address')}",
            f"you announce {', '.join(self.promised) or 'no other address'} (--announce-maddr)",
            f"{counted(len(self.came_in), 'machine')} of the internet connected by themselves",
            "an open port makes it reachable directly: --nat asks the router, or forward one and announce it",
        )


def conclude(evidence: Evidence) -> Reachability:
    """Return how this peer can be reached, as the evidence implies: directly, by a mapped port, through a relay, or unknown."""
    if evidence.own:
        return Reachability.PUBLIC
    if any(is_public(address) for address in evidence.promised):
        return Reachability.MAPPED
    if evidence.relayed:
        return Reachability.PUNCHED if evidence.came_in else Reachability.RELAYED
    # the router's address: libp2p reports it once the router mapped a port, or several peers saw this one there
    if evidence.direct:
        return Reachability.MAPPED
    return Reachability.UNKNOWN


def is_hidden(listening: Sequence[str], interfaces: Collection[str]) -> bool:
    """Return whether none of the listening addresses is public, so that only a port mapping of the router lets others in.

    A peer that knows this says so at once. libp2p takes 15 s and more to find out, and meanwhile tells others the address at which
    its router was seen. Their calls to it are lost, but leave half-open entries in the routers of both sides, and for the two
    minutes that Linux keeps those no hole can be punched.
    """
    return not any(is_public(f"/ip{6 if ':' in host else 4}/{host}") for host in _hosts(listening, interfaces))


def _hosts(listening: Sequence[str], interfaces: Collection[str]) -> Iterator[str]:
    """Yield the hosts in the listening addresses; for a wildcard the IP addresses of the interfaces, for 0.0.0.0 only those of
    IPv4."""
    for address in listening:
        host = host_of(address)
        if host == "0.0.0.0":  # nosec B104  # only compared
            yield from (each for each in interfaces if ":" not in each)
        elif host == "::":
            yield from interfaces  # Linux takes IPv4 there, too
        elif host is not None:
            yield host


def own_interfaces() -> set[str]:
    """Return the IP addresses of this machine's network interfaces."""
    entries = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    families = (socket.AF_INET, socket.AF_INET6)
    return {entry.address.partition("%")[0] for entry in entries if entry.family in families}


REQUEST, SUCCESS = 0x0001, 0x0101
COOKIE = 0x2112A442
XOR_MAPPED_ADDRESS, IPV4 = 0x0020, 0x01
HEADER = struct.Struct(">HHI12s")
MAX_ANSWER_BYTES = 2048


def seen_at(port: socket.socket, server: tuple[str, int], timeout_s: float) -> tuple[str, int] | None:
    """Return the address and port that the STUN server sees as the sender of a request from the socket `port`.

    None without a valid answer within `timeout_s` seconds.
    """
    transaction = secrets.token_bytes(12)
    port.settimeout(timeout_s)
    try:
        port.sendto(HEADER.pack(REQUEST, 0, COOKIE, transaction), server)
        answer, _sender = port.recvfrom(MAX_ANSWER_BYTES)
    except OSError:
        return None
    return mapped_address(answer, transaction)


def mapped_address(answer: bytes, transaction: bytes) -> tuple[str, int] | None:
    """Return the IPv4 address and port in a STUN answer to the request `transaction`; None if it has none."""
    if len(answer) < HEADER.size:
        return None
    kind, size, cookie, asked = HEADER.unpack_from(answer)
    if (kind, cookie, asked) != (SUCCESS, COOKIE, transaction):
        return None
    at, end = HEADER.size, min(len(answer), HEADER.size + size)
    while at + 4 <= end:
        attribute, length = struct.unpack_from(">HH", answer, at)
        value = answer[at + 4 : min(end, at + 4 + length)]
        if attribute == XOR_MAPPED_ADDRESS and len(value) == 8 and value[1] == IPV4:
            port, host = struct.unpack(">HI", value[2:])
            return socket.inet_ntoa(struct.pack(">I", host ^ COOKIE)), port ^ COOKIE >> 16
        at += 4 + -(-length // 4) * 4
    return None


async def answering(addresses: Sequence[str], *, timeout_s: float) -> list[str]:
    """Return the multiaddrs that accept a TCP connection; all of them if none does, since then this machine may be offline."""
    tried = await asyncio.gather(*(answers(address, timeout_s) for address in addresses))
    return [address for address, yes in zip(addresses, tried, strict=True) if yes] or list(addresses)


async def answers(address: str, timeout_s: float) -> bool:
    """Return whether the address accepts a TCP connection within `timeout_s` seconds; also true for other transports, which are not
    tried."""
    service = tcp_service(address)
    if service is None:
        return True  # another transport, which cannot be probed
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(*service), timeout_s)
        writer.close()
        return True
    return False
