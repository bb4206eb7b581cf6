"""Homes behind NAT, out of network namespaces: each home has a router that masquerades and lets nobody in.

    home ---- router ==== the internet (a bridge; addresses of a public range, since libp2p takes no private one for public)

Nothing of it is connected with this machine's own network, and nothing is left behind (`network_lab.py`). Needs nftables, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.real.network_lab import NetworkLab, child, program

PUBLIC = "5.5.5"
DOORS = tuple(f"{PUBLIC}.{number}" for number in range(1, 5))
"""libp2p believes to be seen at an address once four others see it there: no fewer doors, and no hole is punched."""
ABSENT_DOOR = f"{PUBLIC}.5"
DOOR_NETWORK = f"{PUBLIC}.0/29"
VISITOR = f"{PUBLIC}.9"
HOME_NUMBERS = range(16, 32)
HOME_NETWORK = f"{PUBLIC}.16/28"

RULES = f"""
table ip nat {{
  chain after {{
    type nat hook postrouting priority 100;
    oifname "wan" masquerade
  }}
  chain before {{
    type nat hook prerouting priority -100;
  }}
}}
table ip filter {{
  counter direct {{ }}
  chain barred {{ }}
  chain through {{
    type filter hook forward priority 0; policy drop;
    jump barred
    iifname "lan" accept
    ct status dnat accept
    ip saddr {HOME_NETWORK} ct state established,related counter name "direct" accept
    ct state established,related accept
  }}
  chain inward {{
    type filter hook input priority 0; policy drop;
    iifname "lan" accept
    ct state established,related accept
  }}
}}
"""
BAR = f'add rule ip filter barred iifname "lan" ip daddr != {DOOR_NETWORK} reject with tcp reset'
"""The home speaks with the doors only from now on: no hole stays open, and none can be punched."""

FORWARD = ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 4001))
server.settimeout(5)
print("listening", flush=True)
server.accept()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4001), timeout=1)"


def lacking() -> str | None:
    """Why no lab can be built here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "nft", "unshare", "nsenter") if program(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install iproute2 nftables util-linux)"
    try:
        with NatLab(["home"]):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"networks cannot be built here: {getattr(error, 'stderr', error)}"


def reaches(caller: Sequence[str], listener: Sequence[str], address: str) -> bool:
    """Whether a TCP connection from one place to another comes about."""
    with child([*listener, sys.executable, "-c", LISTEN]) as server:
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        called = subprocess.run([*caller, sys.executable, "-c", CONNECT, address], capture_output=True)
        return called.returncode == 0


class NatLab(NetworkLab):
    """`with NatLab(["a", "b"]) as lab`: homes behind routers, and the places `doors` and `visitor` on the internet."""

    def __init__(self, homes: Sequence[str]) -> None:
        super().__init__()
        self._homes = tuple(homes)
        if len(self._homes) > len(HOME_NUMBERS):
            raise ValueError(f"no more than {len(HOME_NUMBERS)} homes")

    def __repr__(self) -> str:
        return f"<NatLab of {', '.join(self._homes)}>"

    def map_ports(self, home: str) -> str:
        """From now on the home's router opens ports for those who ask it (NAT-PMP); the address that it has outside."""
        number = HOME_NUMBERS[self._homes.index(home)]
        lan, wan = f"192.168.{number}.1", f"{PUBLIC}.{number}"
        mapper = [*self.inside(f"{home}-router"), sys.executable, "-m", "tests.real.port_mapper", lan, wan]
        assert self._started(mapper, "listening") is not None
        return wan

    def direct_bytes(self, home: str) -> int:
        """What has come into a home from other homes: through holes, since its router lets nobody else in."""
        listed = json.loads(self._run(f"{home}-router", "nft", "-j", "list", "counter", "ip", "filter", "direct"))
        return next(int(entry["counter"]["bytes"]) for entry in listed["nftables"] if "counter" in entry)

    def bar(self) -> None:
        """From now on the routers let their homes speak with the doors only: what is left is the relay."""
        for home in self._homes:
            self._run(f"{home}-router", "nft", "-f", "-", text=BAR)

    # -- building

    def _build(self) -> None:
        self._hold("internet")
        self._ip("internet", "link add bridge type bridge")
        self._ip("internet", "link set bridge up")
        for place, addresses in (("doors", DOORS), ("visitor", (VISITOR,))):
            self._hold(place)
            self._plug(place, "eth0")
            for address in addresses:
                self._ip(place, f"addr add {address}/24 dev eth0")
        for number, home in zip(HOME_NUMBERS, self._homes, strict=False):
            self._build_home(home, number)

    def _build_home(self, home: str, number: int) -> None:
        router = f"{home}-router"
        self._hold(router)
        self._hold(home)
        self._plug(router, "wan")
        self._cable(router, "lan", home, "eth0")
        self._ip(router, f"addr add {PUBLIC}.{number}/24 dev wan")
        self._ip(router, f"addr add 192.168.{number}.1/24 dev lan")
        self._ip(home, f"addr add 192.168.{number}.2/24 dev eth0")
        self._ip(home, f"route add default via 192.168.{number}.1")
        self._run(router, *FORWARD)
        self._run(router, "nft", "-f", "-", text=RULES)

    def _plug(self, place: str, end: str) -> None:
        """A cable into the internet."""
        port = f"to-{place}"
        self._cable(place, end, "internet", port)
        self._ip("internet", f"link set {port} master bridge")

    def _cable(self, one: str, one_end: str, other: str, other_end: str) -> None:
        self._ip(one, f"link add {one_end} type veth peer name {other_end} netns {self.holders[other]}")
        self._ip(one, f"link set {one_end} up")
        self._ip(other, f"link set {other_end} up")
