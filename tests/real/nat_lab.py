"""Homes behind NAT, out of network namespaces: each home has a router that masquerades and lets nobody in.

    home ---- router ==== the internet (a bridge; addresses of a public range, since libp2p takes no private one for public)

Nothing of it is connected with this machine's own network. A namespace has no name but belongs to a process that holds it
and dies with us, so nothing is left behind, however we end. Needs root, iproute2, nftables and util-linux.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from swarmnode.net.libp2p.parent import die_with_parent

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

HOLD = ("sh", "-c", "echo held; exec sleep infinity")
FORWARD = ("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")

LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 4001))
server.settimeout(5)
print("listening", flush=True)
server.accept()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4001), timeout=1)"


@functools.cache
def program(name: str) -> str | None:
    """Where a program is, the administrator's included: users' PATH often lacks their folders."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


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
    with _child([*listener, sys.executable, "-c", LISTEN]) as server:
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        called = subprocess.run([*caller, sys.executable, "-c", CONNECT, address], capture_output=True)
        return called.returncode == 0


class NatLab:
    """`with NatLab(["a", "b"]) as lab`: homes behind routers, and the places `doors` and `visitor` on the internet."""

    def __init__(self, homes: Sequence[str]) -> None:
        self._homes = tuple(homes)
        self._stack = contextlib.ExitStack()
        self.holders: dict[str, int] = {}  # pids, by place
        if len(self._homes) > len(HOME_NUMBERS):
            raise ValueError(f"no more than {len(HOME_NUMBERS)} homes")

    def __repr__(self) -> str:
        return f"<NatLab of {', '.join(self._homes)}>"

    def __enter__(self) -> NatLab:
        try:
            self._build()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def inside(self, place: str) -> list[str]:
        """What to put before a command that is to run at a place."""
        return [_known("nsenter"), f"--target={self.holders[place]}", "--net", "--"]

    def map_ports(self, home: str) -> str:
        """From now on the home's router opens ports for those who ask it (NAT-PMP); the address that it has outside."""
        number = HOME_NUMBERS[self._homes.index(home)]
        lan, wan = f"192.168.{number}.1", f"{PUBLIC}.{number}"
        mapper = [*self.inside(f"{home}-router"), sys.executable, "-m", "tests.real.port_mapper", lan, wan]
        started = self._stack.enter_context(_child(mapper))
        assert started.stdout is not None and started.stdout.readline() == "listening\n"
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

    def _hold(self, place: str) -> None:
        """A new place: a namespace with a process that keeps it."""
        holder = self._stack.enter_context(_child([_known("unshare"), "--net", "--", *HOLD]))
        assert holder.stdout is not None
        if holder.stdout.readline() != "held\n":
            raise OSError("network namespaces are not permitted")
        self.holders[place] = holder.pid
        self._ip(place, "link set lo up")

    def _plug(self, place: str, end: str) -> None:
        """A cable into the internet."""
        port = f"to-{place}"
        self._cable(place, end, "internet", port)
        self._ip("internet", f"link set {port} master bridge")

    def _cable(self, one: str, one_end: str, other: str, other_end: str) -> None:
        self._ip(one, f"link add {one_end} type veth peer name {other_end} netns {self.holders[other]}")
        self._ip(one, f"link set {one_end} up")
        self._ip(other, f"link set {other_end} up")

    def _ip(self, place: str, arguments: str) -> None:
        self._run(place, "ip", *arguments.split())

    def _run(self, place: str, name: str, *arguments: str, text: str | None = None) -> str:
        """What a command printed at a place. Raises CalledProcessError."""
        command = [*self.inside(place), _known(name), *arguments]
        return subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout


def _known(name: str) -> str:
    return program(name) or name


@contextlib.contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends with the block, or with us."""
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent
    )
    with child:
        try:
            yield child
        finally:
            child.kill()
