#!/usr/bin/env python3
"""Targets for Prometheus' file_sd out of `swarmnode status --json`, for a swarm whose machines you run.

    swarmnode status friends.swarm --json --watch | python3 targets.py --port 9464 --out targets/friends.json

Every node and bootstrap peer is taken to serve metrics at the same port (`--metrics-port 9464 --metrics-host ADDRESS`) of the
address at which the swarm reaches it. With --watch the file follows the swarm; peers that have left are no targets any more.
Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import sys
from pathlib import Path
from typing import Any, Union

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]


def address_of(multiaddr: str) -> Address | None:
    """The IP address in a multiaddr; None for names, and for a way through a relay, which leads to another machine."""
    parts = multiaddr.split("/")
    if "p2p-circuit" in parts or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return None
    return ipaddress.ip_address(parts[2])


def best_address(multiaddrs: list[str], network: str | None) -> Address | None:
    """The first one inside `network`; without a network the first that is no loopback, or else the first."""
    addresses = [address for address in map(address_of, multiaddrs) if address is not None]
    if network is not None:
        addresses = [address for address in addresses if address in ipaddress.ip_network(network)]
    return next((address for address in addresses if not address.is_loopback), next(iter(addresses), None))


def targets(status: dict[str, Any], port: int, network: str | None = None) -> list[dict[str, Any]]:
    """One entry per machine, labelled with the name that its node shows."""
    names = {peer["peer"]: peer["name"] for peer in status["peers"]}
    found: dict[str, str] = {}
    for peer, multiaddrs in sorted(status["addresses"].items()):
        address = best_address(multiaddrs, network)
        if address is not None:
            host = f"[{address}]" if address.version == 6 else str(address)
            found.setdefault(f"{host}:{port}", names.get(peer) or peer[-8:])
    return [{"targets": [target], "labels": {"node": name}} for target, name in found.items()]


def write(path: Path, text: str) -> None:
    """All at once, so that Prometheus never reads half a file."""
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.replace(path)


def main() -> None:
    """Reads a status per line, writes targets for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="where every node serves its metrics")
    parser.add_argument("--network", help="take the addresses inside this network, as in 10.0.0.0/8")
    parser.add_argument("--out", type=Path, help="the file to write; default: standard output")
    arguments = parser.parse_args()
    for line in sys.stdin:
        text = json.dumps(targets(json.loads(line), arguments.port, arguments.network), indent=2) + "\n"
        if arguments.out is None:
            sys.stdout.write(text)
        else:
            write(arguments.out, text)


if __name__ == "__main__":
    main()
