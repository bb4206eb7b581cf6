"""Bootstrap peer: the peer through which new machines find the swarm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from swarmnode.errors import LocalError
from swarmnode.metrics.metric import Readings
from swarmnode.net.addressing.addresses import check_port_free, host_of, is_loopback, is_public, peer_of
from swarmnode.net.identity import Identity
from swarmnode.node.description import Tell
from swarmnode.node.node import Node
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.platform import MACHINE, Platform
from swarmnode.swarm.records.announcement import Machine, Place, State
from swarmnode.swarm.records.manifest import TRAIN
from swarmnode.swarm.storage.swarmfile import Swarm, save_swarm
from swarmnode.weights.chunk_server import Seeder

if TYPE_CHECKING:
    from swarmnode.checkpoints.checkpoint_manager import SharedStates

log = logging.getLogger(__name__)

T = TypeVar("T")

MANIFEST_PATIENCE_S = 30.0
NAT_S, NAT_LOOK_S = 15.0, 0.5  # a router that maps ports does so within seconds


class Bootstrap:
    """Bootstrap peer: a full member of the DHT that relays traffic and serves the manifest and weights, but computes nothing."""

    def __init__(self, host: Host, seeder: Seeder, states: SharedStates | None = None) -> None:
        self.host = host  # its swarm has this peer among its bootstrap peers
        self._seeder = seeder
        self._states = states  # None unless the swarm trains

    @classmethod
    async def start(
        cls, swarm: Swarm, config: HostConfig, *, file: Path | None = None, platform: Platform = MACHINE
    ) -> Bootstrap:
        """Join the swarm as a bootstrap peer and start serving its manifest and weights.

        If the swarm's file promises a bootstrap peer and its addresses are free here, this peer takes that identity and
        those addresses. New addresses are written to `file`, if it is given and writable. Raises LocalError, NetworkDown.
        """
        promised = _promised(swarm)
        if promised is not None:
            config = replace(config, host_maddrs=tuple(dict.fromkeys([*swarm.bootstrap_listen, *config.host_maddrs])))
        host = await Host.join(swarm, config, role="bootstrap", identity=promised, platform=platform)
        try:
            _update_invites(host, file, await _mapped(host))
            if not host.joined.is_set() and promised is None:
                log.warning("waiting for %s: no other machine of it answers yet", swarm.name)
            await host.manifest(patience_s=MANIFEST_PATIENCE_S)
            seeder = await Seeder.start(host, host.swarm)
            if swarm.checkpoint is not None:
                seeder.add_folder(swarm.checkpoint)
            if swarm.adapters is not None:
                seeder.add_adapters(swarm.adapters)
            host.directory.announce(
                Place(state=State.READY, seeds=seeder.units), Machine(device="none"), await host.introduction()
            )
            seeder.on_withdraw = lambda: host.directory.announce(Place(seeds=seeder.units))
            states = None
            if host.swarm.manifest is not None and host.swarm.manifest.mode == TRAIN:
                from swarmnode.checkpoints.checkpoint_manager import SharedStates

                states = await SharedStates.start(host, share=1.0)  # a bootstrap peer needs no disk for weights
        except BaseException:
            await host.close()
            raise
        return cls(host, seeder, states)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set. Raises LocalError if a part of this peer dies of a bug."""
        await self.watch(stop.wait())

    async def watch(self, work: Awaitable[T]) -> T:
        """Run until `work` is done and return its result.

        If a part of this peer dies of a bug, cancels `work` and raises LocalError.
        """
        return await self.host.supervisor.watch(work)

    async def close(self) -> None:
        """Leave the swarm: weights and states first, then the network."""
        if self._states is not None:
            await self._states.close()
        await self._seeder.close()
        await self.host.close()


async def _mapped(host: Host) -> list[str]:
    """Return the peer's addresses, after up to `NAT_S` seconds for the router to map a port if it was asked to."""
    addresses = await host.network.addresses()
    if host.config.nat_port_map:
        give_up_s = host.clock.monotonic() + NAT_S
        while not any(map(is_public, addresses)) and host.clock.monotonic() < give_up_s:
            await asyncio.sleep(NAT_LOOK_S)
            addresses = await host.network.addresses()
    return addresses


def _update_invites(host: Host, file: Path | None, addresses: list[str]) -> None:
    """Put `addresses` into the swarm's invites, public ones first, in place of those that are gone, and write them to `file` if
    anything is new."""
    swarm = host.swarm
    others = [address for address in addresses if not is_loopback(address)]
    own = sorted(others or addresses, key=is_public, reverse=True)
    kept = [each for each in swarm.bootstraps if not _is_gone(each, addresses)]
    bootstraps = tuple(dict.fromkeys([*filter(is_public, own), *kept, *own]))
    host.swarm = replace(swarm, bootstraps=bootstraps)
    if file is not None and bootstraps != swarm.bootstraps:
        try:
            save_swarm(host.swarm, file)
        except LocalError as error:
            log.warning("%s; invites made later will not name this bootstrap peer", error)


def _is_gone(address: str, now: list[str]) -> bool:
    """Return whether the peer with the addresses `now` has left `address`: another port of an interface that it still has.

    A public address may be a router's, which forwards to any port.
    """
    if address in now or is_public(address):
        return False
    return any((peer_of(address), host_of(address)) == (peer_of(each), host_of(each)) for each in now)


def _promised(swarm: Swarm) -> Identity | None:
    """Return the identity that the swarm's file promises for a bootstrap peer; None if there is none or its address is taken."""
    if swarm.bootstrap_key is None:
        return None
    try:
        for address in swarm.bootstrap_listen:
            check_port_free(address)
    except LocalError as error:
        log.warning("%s; new machines connect at another address, which invites from now on name", error)
        return None
    return Identity.from_bytes(swarm.bootstrap_key)


class SwarmHost:
    """A host's machine: a bootstrap peer and a node. The bootstrap peer starts first and stops last, to stay reachable.

    The node joins at the addresses that the bootstrap peer has got, which may differ from those of the file.
    """

    def __init__(
        self, swarm: Swarm, host_config: HostConfig, node: NodeConfig, tell: Tell, *, platform: Platform = MACHINE
    ) -> None:
        self._swarm = swarm
        self._host_config = host_config
        self._platform = platform
        self._bootstrap: Bootstrap | None = None

        def tell_inside(event: str, text: str, **details: Any) -> None:
            """Tell the node's news. It waits for no one but this process's own bootstrap peer."""
            tell(event, f"Opening {swarm.name} …" if event == "waiting" else text, **details)

        self.node = Node(swarm, node, tell_inside, platform=platform)

    def readings(self) -> Readings:
        """Yield the metrics of the node, or those of the bootstrap peer until the node has joined."""
        if self._bootstrap is not None and not self.node.has_joined:
            return self._bootstrap.host.readings()
        return self.node.readings()

    def uses_of(self, invite: bytes) -> int:
        """Return how many uses of an invite, given by its id, the bootstrap peer knows of; 0 before it has joined."""
        control = None if self._bootstrap is None else self._bootstrap.host.access_control
        return 0 if control is None else control.membership.uses.count(invite)

    async def run(self, stop: asyncio.Event, opened: Callable[[Swarm, list[str]], Awaitable[None]]) -> None:
        """Run the bootstrap peer and the node until `stop` is set.

        `opened` is called once, with the swarm as its invites now name it and the addresses at which new machines connect.
        Raises the errors of `Bootstrap.start` and `Node.run`.
        """
        self._bootstrap = await Bootstrap.start(
            self._swarm, self._host_config, file=self._swarm.file, platform=self._platform
        )
        try:
            self.node.swarm = self._bootstrap.host.swarm
            await opened(self._bootstrap.host.swarm, await self._bootstrap.host.network.addresses())
            await self._bootstrap.watch(self.node.run(stop))
        finally:
            await self._bootstrap.close()
