"""Probes of addresses: whether a peer accepts a connection there, and at which address a STUN server sees this machine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import struct
from collections.abc import Sequence

from swarmnode.net.addressing.addresses import tcp_service

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
