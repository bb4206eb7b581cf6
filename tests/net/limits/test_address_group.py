import pytest

from swarmnode.net.addressing.addresses import address_group, home_of, is_wide


@pytest.mark.parametrize(
    ("address", "group", "wide"),
    [
        ("/ip4/8.8.4.4/tcp/4001", "8.8.4.0/24", True),
        ("/ip6/2606:4700:1:2::3/udp/1/quic-v1", "2606:4700:1::/48", True),
        ("/ip4/127.0.0.1/tcp/1", "127.0.0.1", False),
        ("/ip4/192.168.1.7/tcp/1", "192.168.1.7", False),
        ("/ip4/8.8.4.4/tcp/1/p2p/x/p2p-circuit", "8.8.4.0/24 relayed", True),
        ("/dns4/example.org/tcp/1", "example.org", False),
        ("", "", False),
    ],
)
def test_groups(address, group, wide):
    assert (address_group(address), is_wide(group)) == (group, wide)


@pytest.mark.parametrize(
    ("addresses", "home"),
    [
        (("/ip4/192.168.1.7/tcp/1", "/ip4/8.8.4.4/tcp/4001"), "8.8.4.4"),
        (("/ip6/2606:4700:1:2::3/udp/1/quic-v1",), "2606:4700:1:2::/64"),
        (("/ip4/8.8.4.4/tcp/1/p2p/x/p2p-circuit",), ""),  # the relay's
        (("/ip4/192.168.1.7/tcp/1", "/dns4/example.org/tcp/1", ""), ""),
        ((), ""),
    ],
)
def test_homes(addresses: tuple[str, ...], home: str) -> None:
    assert home_of(addresses) == home
