"""A peer that looks at its swarm: who is here and holds what, what the links between them are like, and what they remember."""

from __future__ import annotations

from typing import Any, TypeVar

from swarmnode.client.owner_client import OwnerClient
from swarmnode.codec.measuring_messages import Trace
from swarmnode.measuring.bandwidth import Bandwidth, Prober
from swarmnode.measuring.measured_network import link_matrix, measured_network
from swarmnode.measuring.trace import fetch_traces
from swarmnode.metrics.metric import Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.net.links.link_config import PeerVersions
from swarmnode.peer.host import Host
from swarmnode.peer.picture import picture_of
from swarmnode.swarm.records.manifest import Manifest
from swarmnode.swarm.storage.swarmfile import Swarm

Observer = TypeVar("Observer", bound="SwarmObserver")


class SwarmObserver:
    """By the connection of `host`, which has joined and has the manifest."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._host!r}>"

    async def __aenter__(self: Observer) -> Observer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the swarm."""
        await self._host.close()

    @property
    def peer_id(self) -> PeerId:
        """Who we are in the swarm."""
        return self._host.peer_id

    @property
    def manifest(self) -> Manifest:
        """What the swarm works on."""
        assert self._host.swarm.manifest is not None
        return self._host.swarm.manifest

    @property
    def swarm(self) -> Swarm:
        """As this machine knows it."""
        return self._host.swarm

    def readings(self) -> Readings:
        """What Prometheus may know of the swarm as it is seen from here."""
        return self._host.readings()

    def as_owner(self) -> OwnerClient:
        """What the swarm's owner asks and tells by the same connection, which ends with this client. Raises UsageError where the
        swarm has no owner."""
        return OwnerClient(self._host)

    @property
    def units(self) -> int:
        """Units of the model."""
        return self.manifest.model.units

    def status(self) -> dict[str, Any]:
        """Who is here and holds what, as `swarmnode status --json` prints it."""
        return picture_of(self._host.swarm, self._host.directory.peers(), self._host.standing)

    @property
    def revision(self) -> int:
        """Grows with every change of the picture."""
        return self._host.directory.revision

    async def changed(self) -> None:
        """Wait until the picture of the swarm changes."""
        directory = self._host.directory
        await self._host.supervisor.watch(directory.changed(directory.revision))

    def links(self, most: int) -> dict[str, Any]:
        """What is known of the links between the peers that hold units, of at most so many of them; see `link_matrix`."""
        return link_matrix(self._host, self.units, most)

    def network(self) -> dict[str, Any]:
        """Machines and links to plan on, as `swarmnode network` writes them. Raises LocalError where nobody lends one."""
        return measured_network(self._host.swarm, self._host.directory.peers())

    async def bandwidth(self, most_peers: int = 3) -> Bandwidth:
        """What this machine can send and receive, tested with up to so many peers that hold units: half a megabyte each way and
        peer at most, and less on a slow line. Raises NetworkDown."""
        prober = Prober(self._host, busy=lambda: False)
        try:
            return await prober.look_around(self._holders(), most_peers)
        finally:
            await prober.close()

    @property
    def peer_versions(self) -> PeerVersions:
        """Of the protocol, as the peers that were met speak them."""
        return self._host.link_config.peer_versions

    async def traces(self, trace: bytes) -> dict[PeerId, Trace]:
        """What the peers that hold units remember of the session with this trace id, also one that is over; without those
        that know nothing."""
        return await fetch_traces(self._host, self._holders(), trace)

    def _holders(self) -> list[PeerId]:
        return [peer.peer for peer in self._host.directory.peers().values() if peer.span[1] > 0]
