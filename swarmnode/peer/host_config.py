"""Settings of a peer's presence in a swarm, and the network settings that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.config import MEMBERS_TOO, Rate, Size
from swarmnode.files import home_folder
from swarmnode.net.addressing.addresses import is_loopback, is_public, is_relayed, peer_of
from swarmnode.net.clock import Clock
from swarmnode.net.identity import verify
from swarmnode.net.interfaces import PeerId
from swarmnode.net.network_config import LOOPBACK_ANY_PORT, OPEN_GATE, NetworkConfig
from swarmnode.swarm.peers.record_validation import record_validator
from swarmnode.swarm.records.invite import Role
from swarmnode.swarm.storage.swarmfile import Swarm

if TYPE_CHECKING:
    from swarmnode.membership.access_control import AccessControl

EVERYWHERE_ANY_PORT = "/ip4/0.0.0.0/tcp/0"


@dataclass(frozen=True)
class HostConfig:
    """Settings of a peer's presence. Empty `host_maddrs` mean loopback if only this machine can reach the swarm, else all
    interfaces."""

    home: Path = field(default_factory=home_folder)
    name: str = ""
    host_maddrs: tuple[str, ...] = ()
    announce_maddrs: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()  # further bootstrap peers (multiaddrs with /p2p/), beside the invite's
    nat_port_map: bool = False
    direct: bool = True  # use direct TCP connections to peers that accept them
    lan: bool = False
    join_timeout_s: float = 3.0
    rejoin_s: float = 2.0
    clock_s: float = 60.0  # for other peers' announcements to show whether a clock that jumped is right
    paths_s: float = 10.0  # interval between announcements of the measured paths
    book_s: float = 20.0  # interval between notes of members in the owner's book
    looks_on: bool = False  # a client: no place in the DHT, no announcement
    max_upload_bps: Rate = Rate()  # of all links together, bits/s
    max_download_bps: Rate = Rate()
    # For fetched weights of all swarms and states kept for others; None: most of the free disk space.
    max_cache_bytes: Size = Size()
    # Files and folders on this machine to copy the swarm's weights from before peers are asked; None: none.
    weights: tuple[Path, ...] | None = None
    adapters: str = MEMBERS_TOO  # those that sessions may ask for at this node


def network_config(
    swarm: Swarm, config: HostConfig, identity: Path, access_control: AccessControl | None, *, needs: Role, clock: Clock
) -> NetworkConfig:
    """Return the network settings of a peer of this swarm, in the role that it `needs`. The file `identity` holds its key."""
    membership = None if access_control is None else access_control.membership
    return NetworkConfig(
        identity_path=identity,
        host_maddrs=config.host_maddrs or (default_listen_address(swarm),),
        announce_maddrs=config.announce_maddrs,
        relays=relays_of(swarm, config.peers) if needs is Role.VOLUNTEER else (),
        public=needs is Role.BOOTSTRAP,
        client_mode=config.looks_on,
        nat_port_map=config.nat_port_map,
        direct=config.direct,
        record_validator=record_validator(swarm.id, verify, clock.unix, membership=membership),
        gate=access_control or OPEN_GATE,
        unix=clock.unix,
    )


def relays_of(swarm: Swarm, peers: Sequence[str]) -> tuple[str, ...]:
    """Return the bootstrap peers as relays for peers behind NAT: one address of each, a public one if there is one.

    libp2p takes each address for a relay of its own, and asks none of them for three minutes after one did not answer.
    """
    bootstraps = [
        bootstrap
        for bootstrap in [*peers, *swarm.bootstraps]
        if not is_loopback(bootstrap) and not is_relayed(bootstrap)
    ]
    best: dict[PeerId | None, str] = {}
    for bootstrap in sorted(bootstraps, key=is_public, reverse=True):
        best.setdefault(peer_of(bootstrap), bootstrap)
    return tuple(best.values())


def default_listen_address(swarm: Swarm) -> str:
    """Return loopback if the swarm can only be reached on this machine, else all interfaces."""
    return EVERYWHERE_ANY_PORT if swarm.reaches_others else LOOPBACK_ANY_PORT
