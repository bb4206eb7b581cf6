#!/usr/bin/env python3
"""Write targets for Prometheus' file_sd from `swarmnode status --json`, for a swarm whose machines you run.

    swarmnode status friends.swarm --json --watch | python3 targets.py --port 9464 --out targets/friends.json

Every node and bootstrap peer must serve metrics at the same port (`--metrics-port 9464 --metrics-host ADDRESS`) of the address
at which the swarm reaches it. With --watch the file follows the swarm. A peer that leaves in order is removed; a peer that
vanishes stays for a while, so that an alert can report it. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


@dataclass(frozen=True)
class Target:
    """Target of a scrape: `place` is "address:port", `node` the node's name, `leaving` whether the node drains."""

    place: str
    node: str
    leaving: bool = False


def address_of(multiaddr: str) -> Address | None:
    """Return the IP address in `multiaddr`; None for names, and for a path through a relay, which leads to another machine."""
    parts = multiaddr.split("/")
    if "p2p-circuit" in parts or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return None
    return ipaddress.ip_address(parts[2])


def best_address(multiaddrs: list[str], network: str | None) -> Address | None:
    """Return the first address that is no loopback, else the first; with `network` only addresses inside it count. None if
    there is none."""
    addresses = [address for address in map(address_of, multiaddrs) if address is not None]
    if network is not None:
        addresses = [address for address in addresses if address in ipaddress.ip_network(network)]
    return next((address for address in addresses if not address.is_loopback), next(iter(addresses), None))


def targets(status: dict[str, Any], port: int, network: str | None = None) -> list[Target]:
    """Return one target for each address that a peer in `status` is reached at."""
    peers = {peer["peer"]: peer for peer in status["peers"]}
    found: dict[str, Target] = {}
    for peer, multiaddrs in sorted(status["addresses"].items()):
        address = best_address(multiaddrs, network)
        if address is not None:
            place = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
            told = peers.get(peer, {})
            leaving = told.get("state") == "draining"
            found.setdefault(place, Target(place, told.get("name") or peer[-8:], leaving))
    return list(found.values())


class Register:
    """Register of targets over time: those of the newest status, and those that vanished less than `keep_s` seconds ago."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._seen: dict[str, tuple[Target, float]] = {}

    def update(self, found: list[Target], now_s: float) -> list[Target]:
        """Take in the targets of a status at `now_s` seconds and return all current targets, sorted by place."""
        here = {target.place: (target, now_s) for target in found}
        gone = {
            place: (target, seen_s)
            for place, (target, seen_s) in self._seen.items()
            if place not in here and not target.leaving and now_s - seen_s < self._keep_s
        }
        self._seen = {**gone, **here}
        return [target for _, (target, _) in sorted(self._seen.items())]


def file_sd(found: list[Target]) -> str:
    """Return the text of a file_sd file with the targets `found`."""
    entries = [{"targets": [target.place], "labels": {"node": target.node}} for target in found]
    return json.dumps(entries, indent=2) + "\n"


def write(path: Path, text: str) -> None:
    """Replace the file at `path` in one step, so that Prometheus never reads half a file."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    """Read a status from each line of standard input, and write the targets after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port at which every node serves its metrics")
    parser.add_argument("--network", help="use only addresses inside this network, for example 10.0.0.0/8")
    parser.add_argument(
        "--keep", type=float, default=3600.0, help="seconds to keep a peer that vanished; default: an hour"
    )
    parser.add_argument("--out", type=Path, help="file to write; default: standard output")
    arguments = parser.parse_args()
    register = Register(arguments.keep)
    for line in sys.stdin:
        found = targets(json.loads(line), arguments.port, arguments.network)
        text = file_sd(register.update(found, time.monotonic()))
        if arguments.out is None:
            sys.stdout.write(text)
        else:
            write(arguments.out, text)


if __name__ == "__main__":
    main()
