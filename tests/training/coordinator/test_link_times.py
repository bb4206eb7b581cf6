"""Link times: what is announced of links, as seconds of a microbatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarmnode.codec.tensors import Codec
from swarmnode.plan.view import DEFAULT_RTT_S
from swarmnode.swarm.records.announcement import Announcement, State, peer_digest
from swarmnode.training.coordinator.link_times import LinkTimes

POSITIONS, WIDTH = 100, 50
PLAIN_BITS = 8 * 4 * POSITIONS * WIDTH


def announced(peer: str, **more: Any) -> Announcement:
    return Announcement(1, b"swarm", peer, 1, 0.0, 60.0, 0.0, State.READY, (0, 4), **more)


def between(*announcements: Announcement, width: int = WIDTH) -> tuple[Any, Any]:
    peers = {announcement.peer: announcement for announcement in announcements}
    directory = cast("Any", SimpleNamespace(peers=lambda: peers))
    return LinkTimes(directory, 4, width).between(["a", "b", "stranger"], POSITIONS)


def test_a_line_is_as_fast_as_the_slower_of_its_ways() -> None:
    peers = {
        "home": announced("home", up_bps=1e6, down_bps=9e6),
        "half": announced("half", down_bps=5e6),
        "new": announced("new"),
    }
    links = LinkTimes(cast("Any", SimpleNamespace(peers=lambda: peers)), 4, WIDTH)
    assert [links.line_bps(peer) for peer in (*peers, "stranger")] == [1e6, 5e6, 0.0, 0.0]


def test_the_narrower_line_and_the_measured_round_trip_count() -> None:
    a = announced("a", up_bps=1e6, down_bps=9e6, rtt_us={peer_digest("b"): 80_000})
    delay_NN, sending_NN = between(a, announced("b", up_bps=4e6, down_bps=5e5))
    assert delay_NN[0, 1] == delay_NN[1, 0] == pytest.approx(0.04)
    assert sending_NN[0, 1] == pytest.approx(PLAIN_BITS / 5e5)
    assert sending_NN[1, 0] == pytest.approx(PLAIN_BITS / 4e6)


def test_a_link_that_is_compressed_carries_less() -> None:
    a = announced("a", up_bps=1e6, sends={peer_digest("b"): int(Codec.INT4), peer_digest("c"): int(Codec.BF16)})
    _, plain_NN = between(announced("a", up_bps=1e6), announced("b"))
    _, sending_NN = between(a, announced("b"))
    assert sending_NN[0, 1] < plain_NN[0, 1] / 6
    assert sending_NN[0, 2] == plain_NN[0, 2]


def test_of_a_path_its_sender_tells() -> None:
    a = announced("a", path_kbps={peer_digest("b"): 20_000})
    links = LinkTimes(cast("Any", SimpleNamespace(peers=lambda: {"a": a, "b": announced("b")})), 4, WIDTH)
    assert links.paths_bps(["a", "b", "stranger"]).tolist() == [[0.0, 2e7, 0.0], [0.0] * 3, [0.0] * 3]


def test_codecs_that_nobody_knows_and_lines_that_nobody_measured_are_no_news() -> None:
    delay_NN, sending_NN = between(announced("a", sends={peer_digest("b"): 250}), announced("b", up_bps=1e6))
    assert sending_NN[0, 1] == 0.0 and sending_NN[1, 0] == pytest.approx(PLAIN_BITS / 1e6)
    assert delay_NN[0, 2] == pytest.approx(DEFAULT_RTT_S / 2)


def test_where_the_width_is_not_known_delays_alone_count() -> None:
    _, sending_NN = between(announced("a", up_bps=1.0), announced("b"), width=0)
    assert not sending_NN.any()


def test_who_announces_the_same_address_on_the_open_internet_is_in_one_home() -> None:
    addresses = {"a": "5.6.7.8", "b": "192.168.0.3", "c": "5.6.7.8", "d": "5.6.7.9"}
    peers = {peer: announced(peer, addresses=(f"/ip4/{address}/tcp/1",)) for peer, address in addresses.items()}
    links = LinkTimes(cast("Any", SimpleNamespace(peers=lambda: peers)), 4, WIDTH)
    assert links.homes(["a", "b", "c", "d", "stranger"]) == (0, 1, 0, 3, 4)
    assert links.homes(["a", "b", "d", "stranger"]) == ()
