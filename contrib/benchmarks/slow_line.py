"""Two places, out of network namespaces, that one slow line joins: a relay hands packets over as late, and as fast, as it would.

    with SlowLine(delay_s=0.02, bits_per_s=20e6) as line: subprocess.run([*line.inside("west"), "ip", "addr"])

At a place all processes have the address `ADDRESSES[place]` and the speed of loopback. Nothing is left behind. The requirements are
in `tests/real/network_lab.py`.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import struct
import sys
import threading
import time
from collections import deque
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # networks of namespaces belong to the tests

from tests.real.network_lab import NetworkLab

ADDRESSES = {"west": "5.5.6.1", "east": "5.5.6.2"}  # of a public range: libp2p does not announce private addresses
DEVICE, MTU_BYTES = "line", 9000
MOST_QUEUED_S = 0.5  # what a line's sender has not sent yet; beyond that packets are dropped

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class SlowLine(NetworkLab):
    """A line of `bits_per_s` each way, on which a packet is under way for `delay_s`."""

    def __init__(self, *, delay_s: float, bits_per_s: float) -> None:
        super().__init__()
        self.delay_s, self.bits_per_s = delay_s, bits_per_s

    def crossed_bytes(self) -> int:
        """Return the bytes that the places have sent to each other since the line was made."""
        shown = [json.loads(self._ip(place, f"-j -s link show {DEVICE}"))[0] for place in ADDRESSES]
        return sum(int(link["stats64"]["tx"]["bytes"]) for link in shown)

    def _build(self) -> None:
        for place in ADDRESSES:
            self._hold(place)
        arguments = *self.holders.values(), self.delay_s, self.bits_per_s
        if self._started([sys.executable, __file__, *map(str, arguments)], "up") is None:
            raise OSError("the line's relay ended: may this machine have devices for packets (/dev/net/tun)?")
        for place, address in ADDRESSES.items():
            self._ip(place, f"addr add {address}/24 dev {DEVICE}")
            self._ip(place, f"link set {DEVICE} mtu {MTU_BYTES} up")


def open_device(holder_pid: int) -> int:
    """Move this thread into the namespace of `holder_pid` for good, and return the file of a new packet device there.
    Raises OSError if the namespace or the device cannot be opened."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(f"/proc/{holder_pid}/ns/net").open() as namespace:
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    return device


def hand_over(source: int, target: int, delay_s: float, bits_per_s: float) -> None:
    """Hand packets from `source` to `target` for ever, late by `delay_s` and as slowly as `bits_per_s`. Drops packets
    beyond the queue."""
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
    """Relay packets between two namespaces, for ever."""
    one, other = open_device(one_pid), open_device(other_pid)
    print("up", flush=True)
    threading.Thread(target=hand_over, args=(one, other, delay_s, bits_per_s), daemon=True).start()
    hand_over(other, one, delay_s, bits_per_s)


if __name__ == "__main__":
    relay(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
