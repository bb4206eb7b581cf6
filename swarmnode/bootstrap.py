"""The bootstrap peer: the door of a swarm."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.metrics.metric import Readings
from swarmnode.net.addresses import check_port_free, is_loopback
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import PeerId
from swarmnode.platform import MACHINE, Platform
from swarmnode.presence import Presence, PresenceConfig
from swarmnode.roles.seeder import Seeder
from swarmnode.swarm.announcement import State
from swarmnode.swarm.swarmfile import Swarm, save_swarm

log = logging.getLogger(__name__)

MANIFEST_PATIENCE_S = 30.0


class Bootstrap:
    """The door of a swarm: a full member of the DHT that relays, gives out manifest and weights, and computes nothing."""

    def __init__(self, presence: Presence, seeder: Seeder) -> None:
        self._presence = presence
        self._seeder = seeder
        self.invite = presence.swarm.invite

    def __repr__(self) -> str:
        return f"<Bootstrap {self._presence!r}>"

    @property
    def peer_id(self) -> PeerId:
        return self._presence.peer_id

    @classmethod
    async def start(
        cls, swarm: Swarm, config: PresenceConfig, *, file: Path | None = None, platform: Platform = MACHINE
    ) -> Bootstrap:
        """Open the door. Where the swarm's file promises a bootstrap peer and none runs yet, this is it: same id, same address.

        `file` is updated with our addresses where they are new, and it may be written. Raises LocalError, NetworkDown.
        """
        promised = _promised(swarm)
        if promised is not None:
            config = replace(config, host_maddrs=tuple(dict.fromkeys([*swarm.bootstrap_listen, *config.host_maddrs])))
        presence = await Presence.join(swarm, config, role="bootstrap", identity=promised, platform=platform)
        try:
            bootstraps = tuple(dict.fromkeys([*swarm.bootstraps, *_doors(await presence.network.addresses())]))
            presence.swarm = replace(swarm, bootstraps=bootstraps)
            if file is not None and bootstraps != swarm.bootstraps:
                _keep(presence.swarm, file)
            await presence.manifest(patience_s=MANIFEST_PATIENCE_S)
            seeder = await Seeder.start(presence.network, presence.hello, presence.swarm, presence.link_config)
            if swarm.checkpoint is not None:
                seeder.add_folder(swarm.checkpoint)
            presence.directory.announce(
                state=State.READY,
                **await presence.introduction(),
                device="none",
                seeds=seeder.units,
            )
        except BaseException:
            await presence.close()
            raise
        return cls(presence, seeder)

    def readings(self) -> Readings:
        """What Prometheus may know of this door."""
        return self._presence.readings()

    async def addresses(self) -> list[str]:
        """Multiaddrs under which newcomers reach it."""
        return await self._presence.network.addresses()

    async def close(self) -> None:
        """Leave the swarm: the weights first, then the network."""
        await self._seeder.close()
        await self._presence.close()


def _doors(addresses: list[str]) -> list[str]:
    """The addresses for an invite: loopback means another machine to everybody else, so only where there is nothing but it."""
    return [address for address in addresses if not is_loopback(address)] or addresses


def _keep(swarm: Swarm, file: Path) -> None:
    """Write the swarm's doors into its file; a service may hold it for reading only, and tells them in its invite all the same."""
    try:
        save_swarm(swarm, file)
    except LocalError as error:
        log.warning("%s; later invites do not know this door", error)


def _promised(swarm: Swarm) -> Identity | None:
    """The identity that the swarm's file promises for a bootstrap peer, if its place is free on this machine."""
    if swarm.bootstrap_key is None:
        return None
    try:
        for address in swarm.bootstrap_listen:
            check_port_free(address)
    except LocalError as error:
        log.warning("%s; this is a further bootstrap peer with an identity of its own", error)
        return None
    return Identity.from_bytes(swarm.bootstrap_key)
