"""The part of a router that opens ports for those at home who ask (NAT-PMP, RFC 6886), by rules of nftables.

python -m tests.real.port_mapper LAN_ADDRESS WAN_ADDRESS      # in the router's network namespace, until it is ended
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys

PORT = 5351
EXTERNAL_ADDRESS, MAP_UDP, MAP_TCP = 0, 1, 2
PROTOCOLS = {MAP_UDP: "udp", MAP_TCP: "tcp"}
ANSWER = 128
SUCCESS, UNSUPPORTED = 0, 5


def answer(request: bytes, asker: str, wan: str, opened: dict[tuple[int, int], str]) -> bytes:
    """What the router says; a new port is let through to whoever asks. `opened`: to whom the ports lead."""
    operation = request[1]
    if operation == EXTERNAL_ADDRESS:
        return struct.pack(">BBHI4s", 0, ANSWER, SUCCESS, 1, socket.inet_aton(wan))
    if operation not in PROTOCOLS or len(request) < 12:
        return struct.pack(">BBHI", 0, ANSWER + operation, UNSUPPORTED, 1)
    internal, external, life_s = struct.unpack_from(">HHI", request, 4)
    external = external or internal
    target = f"{asker}:{internal}"
    if life_s and opened.get((operation, external)) != target:
        rule = f"add rule ip nat before iifname wan {PROTOCOLS[operation]} dport {external} dnat to {target}"
        subprocess.run(["nft", *rule.split()], check=True)
        opened[operation, external] = target
    return struct.pack(">BBHIHHI", 0, ANSWER + operation, SUCCESS, 1, internal, external, life_s)


def main(lan: str, wan: str) -> None:
    opened: dict[tuple[int, int], str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind((lan, PORT))
        print("listening", flush=True)
        while True:
            request, sender = port.recvfrom(64)
            if len(request) >= 2:
                port.sendto(answer(request, sender[0], wan, opened), sender)


if __name__ == "__main__":
    main(*sys.argv[1:])
