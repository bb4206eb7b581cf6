"""Addresses that a peer states: which of them are dialled, and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swarmnode.errors import PeerLost
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import PeerId
from swarmnode.net.libp2p.engine import FIRST_PAUSE_S, MAX_ADDRESSES, Engine, EngineConfig
from tests.net.virtual import in_virtual_time

PEER = Identity(bytes(32)).peer_id


class Nowhere:
    """A p2pd that reaches no peer and keeps the addresses that it dials."""

    def __init__(self) -> None:
        self.dialled: list[tuple[str, ...]] = []
        self.connections: list[str] = []

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> None:
        raise PeerLost("routing: not found", peer=peer)

    async def connect(self, peer: PeerId, *addresses: str, timeout_s: float) -> None:
        self.dialled.append(addresses)
        raise PeerLost("connection refused", peer=peer)

    async def addresses_of(self, peer: PeerId) -> list[str]:
        return self.connections


async def dialled(
    folder: Path, told: list[str], *, after_s: tuple[float, ...] = (0.0,), connected: bool = False
) -> int:
    """Return how often addresses are dialled when a stream is opened after each of the pauses."""
    engine, control = Engine(EngineConfig(folder / "identity", direct=False)), Nowhere()
    engine._control = control  # type: ignore[assignment]
    control.connections = ["/ip4/192.0.2.7/tcp/4001"] if connected else []
    for pause_s in after_s:
        await asyncio.sleep(pause_s)
        with pytest.raises(PeerLost, match="routing: not found"):
            await engine.open(PEER, "/test/1", timeout_s=5.0, addresses=told)
    engine._control = None
    await engine.close()
    assert all(0 < len(addresses) <= MAX_ADDRESSES for addresses in control.dialled)
    return len(control.dialled)


@in_virtual_time
async def test_few_addresses_are_dialled_and_no_system_ports_names_groups_or_relays(tmp_path: Path) -> None:
    assert await dialled(tmp_path, [f"/ip4/192.0.2.{number}/tcp/4001" for number in range(1, 9)]) == 1
    relay = f"/ip4/192.0.2.7/tcp/4001/p2p/{Identity(bytes([1] * 32)).peer_id}/p2p-circuit"
    useless = ["/ip4/192.0.2.7/tcp/22", "/dns4/example.org/tcp/4001", "/ip4/224.0.0.1/tcp/4001", relay, "nonsense"]
    assert await dialled(tmp_path, useless) == 0


@in_virtual_time
async def test_a_peer_that_does_not_answer_there_is_dialled_ever_less(tmp_path: Path) -> None:
    told = ["/ip4/192.0.2.7/tcp/4001"]
    assert await dialled(tmp_path, told, after_s=(0.0, FIRST_PAUSE_S / 2)) == 1
    assert await dialled(tmp_path, told, after_s=(0.0, *[FIRST_PAUSE_S + 0.1] * 2)) == 2


@in_virtual_time
async def test_a_connected_peer_is_not_dialled_again(tmp_path: Path) -> None:
    assert await dialled(tmp_path, ["/ip4/192.0.2.7/tcp/4001"], connected=True) == 0
