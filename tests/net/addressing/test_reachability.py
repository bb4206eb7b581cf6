"""What addresses and visitors say of how others get to us."""

from __future__ import annotations

import pytest

from swarmnode.net.addressing.reachability import Evidence, Reachability, conclude, is_hidden

HOME = "/ip4/192.168.178.20/tcp/4001"
ROUTER = "/ip4/93.184.216.34/tcp/4001"
V6 = "/ip6/2a00:1450:4001:80b::200e/tcp/4001"
RELAY = "/ip4/151.101.1.69/tcp/4001/p2p/12D3KooWRelay/p2p-circuit"
SERVER_IPS = ("127.0.0.1", "93.184.216.34")
HOME_IPS = ("127.0.0.1", "192.168.178.20")


@pytest.mark.parametrize(
    ("evidence", "expected"),
    [
        (Evidence(), Reachability.UNKNOWN),
        (Evidence([HOME, "/ip4/127.0.0.1/tcp/4001"], HOME_IPS), Reachability.UNKNOWN),
        (Evidence([HOME], HOME_IPS, visitors=["/ip4/192.168.178.30/tcp/4001"]), Reachability.UNKNOWN),
        (Evidence([ROUTER], SERVER_IPS), Reachability.PUBLIC),
        (Evidence([HOME, V6], (*HOME_IPS, "2a00:1450:4001:80b::200e")), Reachability.PUBLIC),
        (Evidence([HOME, ROUTER], HOME_IPS), Reachability.MAPPED),
        (Evidence([HOME], HOME_IPS, promised=["/dns4/box.example.org/tcp/4001"]), Reachability.MAPPED),
        (Evidence([HOME, RELAY], HOME_IPS), Reachability.RELAYED),
        (Evidence([HOME, RELAY, ROUTER], HOME_IPS), Reachability.RELAYED),
        (Evidence([HOME, RELAY], HOME_IPS, visitors=["/ip4/8.8.8.8/udp/4001/quic-v1"]), Reachability.PUNCHED),
        (Evidence([HOME, RELAY], HOME_IPS, visitors=[RELAY]), Reachability.RELAYED),
        (Evidence([RELAY.replace("151.101.1.69", "93.184.216.34")], SERVER_IPS), Reachability.RELAYED),
    ],
)
def test_conclusions(evidence, expected):
    assert conclude(evidence) is expected


@pytest.mark.parametrize(
    ("listening", "interfaces", "hidden"),
    [
        (["/ip4/0.0.0.0/tcp/0"], HOME_IPS, True),
        (["/ip4/0.0.0.0/tcp/0"], ["127.0.0.1", "100.64.7.7"], True),  # a provider's NAT
        (["/ip4/0.0.0.0/tcp/0"], SERVER_IPS, False),
        (["/ip4/192.168.178.20/tcp/4001"], [*HOME_IPS, *SERVER_IPS], True),  # it listens on one side alone
        (["/ip4/0.0.0.0/tcp/0"], [*HOME_IPS, "2a00:1450:4001:80b::200e"], True),  # it does not listen there
        (["/ip6/::/tcp/0"], [*HOME_IPS, "2a00:1450:4001:80b::200e"], False),
        (["/ip6/::/tcp/0"], [*HOME_IPS, "::1", "fe80::1"], True),
        (["/ip6/::/tcp/0"], SERVER_IPS, False),
        (["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"], [*HOME_IPS, "fd00::5"], True),
    ],
)
def test_who_has_no_address_of_the_internet_is_hidden(listening, interfaces, hidden):
    assert is_hidden(listening, interfaces) is hidden
