"""Homes behind NAT, out of network namespaces: each home has a router that masquerades and lets nobody in.

    home ---- router ==== the internet (a bridge; addresses of a public range, since libp2p takes no private one for public)

Nothing of it is connected with this machine's own network. Needs root, iproute2 and nftables.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

PUBLIC = "5.5.5"
DOORS = tuple(f"{PUBLIC}.{number}" for number in range(1, 5))
"""libp2p believes to be seen at an address once four others see it there: no fewer doors, and no hole is punched."""
DOOR_NETWORK = f"{PUBLIC}.0/29"

RULES = """
table ip nat {{
  chain after {{
    type nat hook postrouting priority 100;
    oifname "wan" masquerade
  }}
}}
table ip filter {{
  counter direct {{ }}
  chain through {{
    type filter hook forward priority 0; policy drop;
    iifname "lan" {punchable}accept
    iifname "wan" ip saddr != {doors} ct state established,related counter name "direct" accept
    ct state established,related accept
  }}
  chain inward {{
    type filter hook input priority 0; policy drop;
    iifname "lan" accept
    ct state established,related accept
  }}
}}
"""
DOORS_ALONE = f"ip daddr {DOOR_NETWORK} "
"""A router that lets its home speak with the doors only, so that no hole can be punched: what is left is the relay."""


def lacking() -> str | None:
    """Why no lab can be built here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "nft", "sysctl") if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    probe = f"snprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    rules = subprocess.run(["ip", "netns", "exec", probe, "nft", "list", "ruleset"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"nftables do not work here: {rules.stderr.strip()}" if rules.returncode else None


LISTEN = """
import socket
server = socket.create_server(("0.0.0.0", 4001))
server.settimeout(5)
print("listening", flush=True)
server.accept()
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4001), timeout=1)"


def reaches(caller: Sequence[str], listener: Sequence[str], address: str) -> bool:
    """Whether a TCP connection from one place to another comes about."""
    server = subprocess.Popen(
        [*listener, sys.executable, "-c", LISTEN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"listening\n"
        called = subprocess.run([*caller, sys.executable, "-c", CONNECT, address], capture_output=True)
        return called.returncode == 0
    finally:
        server.kill()
        server.wait()


class NatLab:
    """`with NatLab(["a", "b"]) as lab`: places for doors on the internet, and homes behind routers."""

    def __init__(self, homes: Sequence[str], *, punchable: bool = True) -> None:
        self._prefix = f"sn{os.getpid()}"
        self._homes = tuple(homes)
        self._rules = RULES.format(doors=DOOR_NETWORK, punchable="" if punchable else DOORS_ALONE)
        self._spaces: list[str] = []

    def __repr__(self) -> str:
        return f"<NatLab of {', '.join(self._homes)}>"

    def __enter__(self) -> NatLab:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def inside(self, place: str) -> list[str]:
        """What to put before a command that is to run at a place: `internet` or a home."""
        return ["ip", "netns", "exec", self._space(place)]

    def direct_bytes(self, home: str) -> int:
        """What has come into a home from others than the doors: through holes, since its router lets nobody else in."""
        command = [*self.inside(f"{home}router"), "nft", "-j", "list", "counter", "ip", "filter", "direct"]
        entries = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["nftables"]
        return next(int(entry["counter"]["bytes"]) for entry in entries if "counter" in entry)

    def _space(self, place: str) -> str:
        return f"{self._prefix}{place}"

    def _build(self) -> None:
        internet = self._new("internet")
        _ip("-n", internet, "link", "add", "bridge", "type", "bridge")
        for door in DOORS:
            _ip("-n", internet, "addr", "add", f"{door}/24", "dev", "bridge")
        _ip("-n", internet, "link", "set", "bridge", "up")
        for number, home in enumerate(self._homes, 10):
            self._build_home(internet, home, number)

    def _build_home(self, internet: str, name: str, number: int) -> None:
        router, home = self._new(f"{name}router"), self._new(name)
        self._cable(router, "wan", internet, f"port{number}")
        _ip("-n", internet, "link", "set", f"port{number}", "master", "bridge")
        self._cable(router, "lan", home, "eth0")
        _ip("-n", router, "addr", "add", f"{PUBLIC}.{number}/24", "dev", "wan")
        _ip("-n", router, "addr", "add", f"192.168.{number}.1/24", "dev", "lan")
        _ip("-n", home, "addr", "add", f"192.168.{number}.2/24", "dev", "eth0")
        _ip("-n", home, "route", "add", "default", "via", f"192.168.{number}.1")
        _run([*self.inside(f"{name}router"), "sysctl", "-qw", "net.ipv4.ip_forward=1"])
        _run([*self.inside(f"{name}router"), "nft", "-f", "-"], text=self._rules)

    def _new(self, place: str) -> str:
        space = self._space(place)
        _ip("netns", "add", space)
        self._spaces.append(space)
        _ip("-n", space, "link", "set", "lo", "up")
        return space

    @staticmethod
    def _cable(one: str, one_end: str, other: str, other_end: str) -> None:
        _ip("-n", one, "link", "add", one_end, "type", "veth", "peer", "name", other_end, "netns", other)
        _ip("-n", one, "link", "set", one_end, "up")
        _ip("-n", other, "link", "set", other_end, "up")

    def close(self) -> None:
        """Take it down. Safe to call twice."""
        while self._spaces:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", self._spaces.pop())


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str], *, text: str | None = None) -> None:
    subprocess.run(command, input=text, check=True, capture_output=True, text=True)
