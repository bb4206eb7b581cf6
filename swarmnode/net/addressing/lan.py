"""Peers of the same swarm on the same local network, by multicast DNS (RFC 6762, 6763).

Each peer announces the service `_swarmnode._tcp` with the first bytes of its swarm's id and the multiaddrs that other machines can
reach, and browses for others. Answers are hints from strangers: they are bounded, checked to be multiaddrs, and proven only when
the network dials them and the peer id turns out right.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zeroconf import ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from swarmnode.errors import LocalError
from swarmnode.net.addressing.addresses import is_loopback, of_stranger, tcp_endpoint, without_peer
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks

log = logging.getLogger(__name__)

SERVICE = "_swarmnode._tcp.local."
SWARM_PREFIX_BYTES = 8
MAX_ADDRESSES = 8  # per peer
MAX_PEERS = 64
REQUEST_TIMEOUT_MS = 3000


class LanDiscovery:
    """Announcement of this peer on the local network, and the addresses found there. Made by `start`."""

    def __init__(self, swarm_id: bytes, peer_id: PeerId, addresses: Sequence[str]) -> None:
        self._swarm = swarm_id[:SWARM_PREFIX_BYTES].hex()
        self._peer_id = peer_id
        self._own = [address for address in addresses if not is_loopback(address)][:MAX_ADDRESSES]
        self._discovered: dict[PeerId, list[str]] = {}
        self._zeroconf: AsyncZeroconf | None = None
        self._browser: AsyncServiceBrowser | None = None
        self._tasks = Tasks("LAN discovery", on_crash=None)  # a peer's next announcement is asked about again

    def __repr__(self) -> str:
        state = "announcing" if self._zeroconf is not None else "silent"
        return f"<LanDiscovery {state} {len(self._own)} addresses, {len(self._discovered)} peers found>"

    @classmethod
    async def start(cls, swarm_id: bytes, peer_id: PeerId, addresses: Sequence[str]) -> LanDiscovery:
        """Announce these addresses and look for peers of the same swarm on the interfaces that carry them.

        Loopback addresses are not announced; if there are no others, nothing is sent. Raises LocalError if the announcement fails.
        """
        discovery = cls(swarm_id, peer_id, addresses)
        endpoints = [endpoint for address in discovery._own if (endpoint := tcp_endpoint(address))]
        if not endpoints:
            return discovery
        hosts = sorted({host for host, _port in endpoints})
        try:
            discovery._zeroconf = AsyncZeroconf(interfaces=hosts)
            # A peer id is unique: the second of probing for others with this name can be saved.
            places = {f"a{index}": without_peer(address) for index, address in enumerate(discovery._own)}
            service = AsyncServiceInfo(
                SERVICE,
                f"{discovery._peer_id}.{SERVICE}",
                parsed_addresses=list(hosts),
                port=endpoints[0][1],
                properties={"swarm": discovery._swarm, **places},
                server=f"{discovery._peer_id}.local.",
            )
            await discovery._zeroconf.async_register_service(service, cooperating_responders=True)
        except OSError as error:
            await discovery.close()
            raise LocalError(f"cannot announce this peer on the local network: {error}") from error
        discovery._browser = AsyncServiceBrowser(discovery._zeroconf.zeroconf, SERVICE, handlers=[discovery._changed])
        return discovery

    def addresses(self) -> list[str]:
        """Return the multiaddrs of the swarm's other peers on the local network that have not left."""
        return [address for addresses in self._discovered.values() for address in addresses]

    def _changed(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        peer = name.removesuffix(f".{SERVICE}")
        if state_change is ServiceStateChange.Removed:
            self._discovered.pop(peer, None)
        elif peer != self._peer_id and (len(self._discovered) < MAX_PEERS or peer in self._discovered):
            self._tasks.spawn(self._ask(zeroconf, peer, name), f"ask {peer}")

    async def _ask(self, zeroconf: Zeroconf, peer: PeerId, name: str) -> None:
        service = AsyncServiceInfo(SERVICE, name)
        if not await service.async_request(zeroconf, REQUEST_TIMEOUT_MS):
            return
        properties = service.decoded_properties
        if properties.get("swarm") == self._swarm:
            told = [place for index in range(MAX_ADDRESSES) if (place := properties.get(f"a{index}"))]
            self._discovered[peer] = usable(told, peer)
            log.debug("found on the local network: %s", self._discovered[peer])

    async def close(self) -> None:
        """Withdraw the announcement and stop. Calling it again changes nothing."""
        await self._tasks.close()
        if self._browser is not None:
            await self._browser.async_cancel()
            self._browser = None
        if self._zeroconf is not None:
            await self._zeroconf.async_unregister_all_services()
            await self._zeroconf.async_close()
            self._zeroconf = None


def usable(announced: Sequence[str], peer: PeerId) -> list[str]:
    """Return the addresses among `announced`, a stranger's, that can lead to `peer` on another machine."""
    return [address for address in of_stranger(announced, peer) if not is_loopback(address)]
