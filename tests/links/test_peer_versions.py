"""Versions of the protocol: who works with whom, and how a node learns that it has grown old."""

from __future__ import annotations

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import Hello
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.links.link import check_greeting
from swarmnode.links.link_config import PEERS_KEPT, PeerVersions
from swarmnode.net.addressing.addresses import Claimant

SWARM = bytes(32)


def speaks(oldest: int, newest: int = 0) -> Hello:
    return Hello(oldest, SWARM, newest=newest)


def home(number: object) -> Claimant:
    return Claimant(f"home {number}", f"peer {number}")


@pytest.mark.parametrize("theirs", [speaks(2), speaks(1, 2), speaks(2, 9), speaks(3), speaks(3, 4), speaks(2, 1)])
def test_neighbouring_versions_work_together(theirs: Hello) -> None:
    check_greeting(theirs, speaks(2, 3), "peer")


@pytest.mark.parametrize(
    ("theirs", "named"), [(speaks(1), "version 1"), (speaks(4), "version 4"), (speaks(4, 6), "version 4")]
)
def test_who_has_none_in_common_is_told_which_one_is_asked_for(theirs: Hello, named: str) -> None:
    with pytest.raises(ProtocolError, match=named) as caught:
        check_greeting(theirs, speaks(2, 3), "peer")
    assert caught.value.code == ErrorCode.VERSION


@pytest.mark.parametrize(
    ("newest", "newer"),
    [
        ([], None),
        ([VERSION + 1], None),
        ([VERSION + 1, VERSION], None),
        ([VERSION + 1] * 2, VERSION + 1),
        ([65535, VERSION + 1, VERSION + 1], VERSION + 1),
        ([65535, VERSION, VERSION], None),
        ([VERSION + 1] * 2 + [VERSION] * 2, None),
    ],
)
def test_a_version_is_newer_where_more_than_half_speak_it(newest: list[int], newer: int | None) -> None:
    versions = PeerVersions()
    for number, version in enumerate(newest):
        versions.greeted(home(number), speaks(VERSION, version))
    assert versions.newer == newer


def test_who_greeted_longest_ago_is_forgotten() -> None:
    versions = PeerVersions()
    for number in range(PEERS_KEPT):
        versions.greeted(home(number), speaks(VERSION, VERSION + 1))
    assert versions.newer == VERSION + 1
    for number in range(PEERS_KEPT):
        versions.greeted(home(f"later {number}"), speaks(VERSION))
        versions.greeted(home(0), speaks(VERSION, VERSION + 1))
    assert versions.newer is None and repr(versions) == f"<PeerVersions of {PEERS_KEPT} peers>"


def test_invented_peers_of_one_network_have_one_voice() -> None:
    versions = PeerVersions()
    for number in range(100):
        versions.greeted(Claimant("203.0.113.0/24", f"invented {number}"), speaks(VERSION, VERSION + 1))
    for number in range(2):
        versions.greeted(home(number), speaks(VERSION))
    assert versions.newer is None
