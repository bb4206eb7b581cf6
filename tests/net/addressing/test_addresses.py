from __future__ import annotations

import socket

import pytest

from swarmnode.errors import LocalError, UsageError
from swarmnode.net.addressing.addresses import (
    check,
    check_port_free,
    free_port,
    is_loopback,
    peer_of,
    tcp_endpoint,
    with_peer,
    with_ports,
    without_peer,
)

PEER = "12D3KooWBvVeHJLGNP4jyCgqeZmSTYstRa41dHbXkRqfmUionyHM"
RELAY = "12D3KooWE9zEbSWDPJB7YaFay6rjsjqrCUKsohxc1KpvakYF9jid"
CIRCUIT = f"/ip4/10.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"


@pytest.mark.parametrize(
    "address",
    ["/ip4/127.0.0.1/tcp/4001", "/ip6/::1/udp/4001/quic-v1", "/dns4/example.org/tcp/4001", CIRCUIT],
)
def test_good_addresses_stay_as_they_are(address: str) -> None:
    assert check(address) == address
    assert check(with_peer(address, PEER), needs_peer=True) == with_peer(address, PEER)


@pytest.mark.parametrize("address", ["", "127.0.0.1:4001", "/ip4/300.0.0.1/tcp/1", "/ip4/1.2.3.4/tcp", "/nonsense/1"])
def test_bad_addresses_are_the_users_fault(address: str) -> None:
    with pytest.raises(UsageError, match="is not a multiaddr like /ip4/"):
        check(address)


def test_an_address_that_must_name_its_peer() -> None:
    with pytest.raises(UsageError, match="must end with /p2p/ and a peer id"):
        check("/ip4/127.0.0.1/tcp/4001", needs_peer=True)


def test_peer_ids_at_the_end() -> None:
    assert peer_of("/ip4/127.0.0.1/tcp/1") is None
    assert peer_of(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}") == PEER
    assert peer_of(CIRCUIT) == PEER
    assert peer_of(f"/ip4/10.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit") is None
    assert without_peer(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}") == "/ip4/127.0.0.1/tcp/1"
    assert without_peer(CIRCUIT) == CIRCUIT.removesuffix(f"/p2p/{PEER}")
    assert with_peer(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}", PEER) == f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"


@pytest.mark.parametrize(
    ("address", "loopback", "endpoint"),
    [
        ("/ip4/127.0.0.1/tcp/1", True, ("127.0.0.1", 1)),
        ("/ip4/127.8.9.1/udp/1/quic-v1", True, None),
        ("/ip6/::1/tcp/2", True, ("::1", 2)),
        ("/dns4/localhost/tcp/1", True, None),
        ("/ip4/10.0.0.1/tcp/0", False, ("10.0.0.1", 0)),
        ("/dns4/example.org/tcp/1", False, None),
        ("/ip4/0.0.0.0/tcp/3", False, ("0.0.0.0", 3)),
    ],
)
def test_where_an_address_leads(address: str, loopback: bool, endpoint: tuple[str, int] | None) -> None:
    assert is_loopback(address) is loopback
    assert tcp_endpoint(address) == endpoint


def test_open_ports_are_filled_in_from_what_is_listened_on() -> None:
    configured = ["/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/udp/0/quic-v1", "/ip4/127.0.0.1/tcp/7"]
    listening = ["/ip4/127.0.0.1/tcp/4001", "/ip4/10.0.0.1/tcp/4001", "/ip4/10.0.0.1/udp/4002/quic-v1"]
    assert with_ports(configured, listening) == (
        "/ip4/0.0.0.0/tcp/4001",
        "/ip4/0.0.0.0/udp/4002/quic-v1",
        "/ip4/127.0.0.1/tcp/7",
    )
    assert with_ports(configured[:1], []) == ("/ip4/0.0.0.0/tcp/0",)


def test_a_port_in_use_is_found_and_a_free_one_too() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(LocalError, match=rf"cannot listen on /ip4/127.0.0.1/tcp/{port}: .*; choose another port"):
            check_port_free(f"/ip4/127.0.0.1/tcp/{port}")
    check_port_free(f"/ip4/127.0.0.1/tcp/{port}")
    check_port_free("/ip4/127.0.0.1/tcp/0")
    check_port_free("/dns4/example.org/tcp/1")
    assert 0 < free_port() < 65536
