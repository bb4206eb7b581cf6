"""Observer of a swarm: its peers with their layers, the links between them, and the traces that they remember."""

from __future__ import annotations

from typing import Any, TypeVar

from swarmnode.client.owner_client import OwnerClient
from swarmnode.codec.measuring_messages import Trace
from swarmnode.links.link_config import PeerVersions
from swarmnode.measuring.bandwidth import Bandwidth, Prober
from swarmnode.measuring.trace import fetch_traces
from swarmnode.metrics.metric import Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.host import Host
from swarmnode.peer.swarm_status import link_matrix, measured_network, picture_of
from swarmnode.swarm.records.manifest import Manifest
from swarmnode.swarm.storage.swarmfile import Swarm

Observer = TypeVar("Observer", bound="SwarmObserver")


class SwarmObserver:
    """Observer of a swarm by the connection of `host`, which has joined and has the manifest. As an async context manager, it
    leaves the swarm at the end."""

    def __init__(self, host: Host) -> None:
        self._host = host

    async def __aenter__(self: Observer) -> Observer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Leave the swarm."""
        await self._host.close()

    @property
    def peer_id(self) -> PeerId:
        """Id of this client in the swarm."""
        return self._host.peer_id

    @property
    def manifest(self) -> Manifest:
        """Manifest of the swarm."""
        assert self._host.swarm.manifest is not None
        return self._host.swarm.manifest

    @property
    def swarm(self) -> Swarm:
        """Description of the observed swarm on this machine: id, name and manifest."""
        return self._host.swarm

    def readings(self) -> Readings:
        """Return the metrics of the swarm as seen from here, for Prometheus."""
        return self._host.readings()

    def as_owner(self) -> OwnerClient:
        """Return the owner's client on the same connection, which ends with this client. Raises UsageError if the swarm has no
        owner."""
        return OwnerClient(self._host)

    @property
    def units(self) -> int:
        """Number of layers of the model."""
        return self.manifest.model.units

    def status(self) -> dict[str, Any]:
        """Return the peers and the layers that they hold, in the format of `swarmnode status --json`."""
        return picture_of(self._host.swarm, self._host.directory.peers(), self._host.standing)

    @property
    def revision(self) -> int:
        """Number that grows with every change of the swarm's picture."""
        return self._host.directory.revision

    async def changed(self) -> None:
        """Wait until the known peers of the swarm change."""
        directory = self._host.directory
        await self._host.supervisor.watch(directory.changed(directory.revision))

    def links(self, most: int) -> dict[str, Any]:
        """Return the links between the peers that hold layers, for at most `most` peers; see `link_matrix`."""
        return link_matrix(self._host, self.units, most)

    def network(self) -> dict[str, Any]:
        """Return machines and links for planning, as `swarmnode status --export` does. Raises LocalError if no machine is lent."""
        return measured_network(self._host.swarm, self._host.directory.peers())

    async def bandwidth(self, most_peers: int = 3) -> Bandwidth:
        """Measure the upload and the download of this machine with up to `most_peers` peers that hold layers. It sends and receives
        at most half a megabyte per peer, less on a slow line. Raises NetworkDown."""
        prober = Prober(self._host, busy=lambda: False)
        try:
            return await prober.probe_candidates(self._holders(), most_peers)
        finally:
            await prober.close()

    @property
    def peer_versions(self) -> PeerVersions:
        """Protocol versions of the peers that this client has met."""
        return self._host.link_config.peer_versions

    async def traces(self, trace: bytes) -> dict[PeerId, Trace]:
        """Return the steps that the peers which hold layers remember of the session with the trace id `trace`, even if it is over.
        Peers that remember nothing are left out."""
        return await fetch_traces(self._host, self._holders(), trace)

    def _holders(self) -> list[PeerId]:
        return [peer.peer for peer in self._host.directory.peers().values() if peer.span[1] > 0]
