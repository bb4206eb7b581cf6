"""Two places, out of network namespaces, that one slow line joins: a relay hands packets over as late, and as fast, as it would.

    with SlowLine(delay_s=0.02, bits_per_s=20e6) as line: subprocess.run([*line.inside("west"), "ip", "addr"])

At a place everybody has the address `ADDRESSES[place]` and the speed of loopback. A namespace belongs to a process that dies with
us, so nothing is left behind. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

from swarmnode.net.libp2p.parent import die_with_parent

ADDRESSES = {"west": "5.5.6.1", "east": "5.5.6.2"}  # of a public range: libp2p tells nobody of private ones
DEVICE, MTU_BYTES = "line", 9000
MOST_QUEUED_S = 0.5  # what a line's sender has not sent yet; beyond that packets are dropped
HOLD = ("sh", "-c", "echo held; exec sleep infinity")

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class SlowLine:
    """A line of `bits_per_s` each way, on which a packet is under way for `delay_s`."""

    def __init__(self, *, delay_s: float, bits_per_s: float) -> None:
        self.delay_s, self.bits_per_s = delay_s, bits_per_s
        self._stack = contextlib.ExitStack()
        self._holders: dict[str, int] = {}  # pids

    def __enter__(self) -> SlowLine:
        try:
            for place in ADDRESSES:
                self._holders[place] = self._child("unshare", "--net", "--", *HOLD)
                self._ip(place, "link set lo up")
            relay = (sys.executable, __file__, *self._holders.values(), self.delay_s, self.bits_per_s)
            self._child(*map(str, relay))
            for place, address in ADDRESSES.items():
                self._ip(place, f"addr add {address}/24 dev {DEVICE}")
                self._ip(place, f"link set {DEVICE} mtu {MTU_BYTES} up")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def inside(self, place: str) -> list[str]:
        """What to put before a command that is to run at a place."""
        return ["nsenter", f"--target={self._holders[place]}", "--net", "--"]

    def crossed_bytes(self) -> int:
        """What the places have sent to each other until now."""
        shown = [json.loads(self._ip(place, f"-j -s link show {DEVICE}"))[0] for place in ADDRESSES]
        return sum(int(link["stats64"]["tx"]["bytes"]) for link in shown)

    def _child(self, *command: str) -> int:
        """A process that ends with us, once it has said that it is ready; its pid."""
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        self._stack.enter_context(child)
        self._stack.callback(child.kill)
        assert child.stdout is not None
        if not child.stdout.readline():
            raise OSError(f"{command[0]} ended with code {child.wait()}: are network namespaces permitted?")
        return child.pid

    def _ip(self, place: str, arguments: str) -> str:
        command = [*self.inside(place), "ip", *arguments.split()]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def open_device(holder_pid: int) -> int:
    """A device for packets in another namespace, in which this thread stays; its file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{holder_pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def hand_over(source: int, target: int, delay_s: float, bits_per_s: float) -> None:
    """One direction, for ever."""
    under_way: deque[tuple[float, bytes]] = deque()  # until when, and the packet
    free_s = time.monotonic()  # when the sender has sent all that it has
    while True:
        wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        readable, _, _ = select.select([source], [], [], wait_s)
        now_s = time.monotonic()
        if readable:
            packet = os.read(source, MTU_BYTES)
            if free_s - now_s < MOST_QUEUED_S:
                free_s = max(free_s, now_s) + 8 * len(packet) / bits_per_s
                under_way.append((free_s + delay_s, packet))
        while under_way and under_way[0][0] <= now_s:
            os.write(target, under_way.popleft()[1])


def relay(one_pid: int, other_pid: int, delay_s: float, bits_per_s: float) -> None:
    """The line itself, for ever."""
    one, other = open_device(one_pid), open_device(other_pid)
    print("up", flush=True)
    threading.Thread(target=hand_over, args=(one, other, delay_s, bits_per_s), daemon=True).start()
    hand_over(other, one, delay_s, bits_per_s)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
