"""Before holes are punched."""

from __future__ import annotations

from swarmnode.net.libp2p.engine import prepare

DIRECT = "/ip4/8.8.8.8/tcp/4001"
RELAYED = f"{DIRECT}/p2p/12D3KooWdoor/p2p-circuit"


class Connected(dict[str, list[str]]):
    """As p2pd's control socket tells and ends connections."""

    async def connected(self) -> dict[str, list[str]]:
        return dict(self)

    async def disconnect(self, peer: str) -> None:
        del self[peer]


async def test_connections_that_have_relays_alone_are_ended() -> None:
    connections = Connected(door=[DIRECT], met=[RELAYED, DIRECT], missed=[RELAYED], twice=[RELAYED, RELAYED])
    await prepare(connections, settle_s=0)
    assert set(connections) == {"door", "met"}
