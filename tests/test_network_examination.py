"""A machine's way to the internet, told from servers on loopback that answer as a test wants."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from swarmnode.examination import NTP_EPOCH_S, clock, nat, upnp
from swarmnode.net.addressing.reachability import COOKIE, SUCCESS, mapped_address

Answer = Callable[[bytes, tuple[str, int]], bytes]


@contextlib.contextmanager
def server(answer: Answer) -> Iterator[tuple[str, int]]:
    """Answers each datagram, until an empty one comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as port:
        port.bind(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                asked, sender = port.recvfrom(2048)
                if not asked:
                    return
                port.sendto(answer(asked, sender), sender)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield port.getsockname()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            end.sendto(b"", port.getsockname())
        thread.join()


def time_server(ahead_s: float) -> Answer:
    def answer(_asked: bytes, _sender: tuple[str, int]) -> bytes:
        return bytes(40) + struct.pack(">II", int(time.time() + ahead_s) + NTP_EPOCH_S, 0)

    return answer


def stun_server(host: str) -> Answer:
    """Says that it sees everybody at `host`, at their own port."""
    return lambda asked, sender: binding(asked[8:20], host, sender[1])


def binding(transaction: bytes, host: str, port: int) -> bytes:
    address = struct.unpack(">I", socket.inet_aton(host))[0] ^ COOKIE
    value = struct.pack(">BBHI", 0, 1, port ^ COOKIE >> 16, address)
    attributes = struct.pack(">HH3sx", 0x8022, 3, b"abc") + struct.pack(">HH", 0x0020, 8) + value
    return struct.pack(">HHI12s", SUCCESS, len(attributes), COOKIE, transaction) + attributes


@pytest.mark.parametrize(("ahead_s", "words"), [(60.0, "behind"), (-60.0, "ahead")])
def test_a_clock_that_is_off(ahead_s: float, words: str) -> None:
    with server(time_server(ahead_s)) as ours:
        found = clock([ours])
    assert found.verdict == "bad" and words in found.seen and found.remedy


def test_a_clock_that_nobody_can_tell() -> None:
    with server(lambda _asked, _sender: b"short") as ours:
        assert clock([ours]).verdict == "doubtful"


@pytest.mark.parametrize(
    ("hosts", "verdict", "words"),
    [
        (["127.0.0.1", "127.0.0.1"], "good", "none"),
        (["5.5.5.16", "5.5.5.16"], "good", "ports are kept"),
        (["5.5.5.16", "5.5.5.17"], "doubtful", "symmetric"),
        (["5.5.5.16"], "doubtful", "seen at 5.5.5.16"),
    ],
)
def test_kinds_of_nat(hosts: list[str], verdict: str, words: str) -> None:
    with contextlib.ExitStack() as ends:
        found = nat([ends.enter_context(server(stun_server(host))) for host in hosts])
    assert found.verdict == verdict and words in found.seen
    assert verdict == "good" or found.remedy


def test_a_router() -> None:
    with server(lambda _asked, _sender: b"HTTP/1.1 200 OK\r\n\r\n") as router:
        assert "maps ports" in upnp(router).seen
    with server(lambda _asked, _sender: b"\x00") as router:
        assert upnp(router).verdict == "doubtful"


@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_what_is_no_answer_tells_nothing(cut: int) -> None:
    whole = binding(b"t" * 12, "5.5.5.16", 4001)
    assert mapped_address(whole, b"t" * 12) == ("5.5.5.16", 4001)
    assert mapped_address(whole[:cut], b"t" * 12) is None and mapped_address(whole, b"u" * 12) is None
