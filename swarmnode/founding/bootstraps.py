"""Where newcomers shall find a new swarm: addresses that are checked, and lead somewhere, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from swarmnode.errors import UsageError
from swarmnode.net.addressing.addresses import (
    check_all,
    free_port,
    host_of,
    is_link_local,
    is_loopback,
    is_wildcard,
    peer_of,
    port_of,
    with_host,
    with_port,
)
from swarmnode.net.addressing.reachability import own_interfaces


@dataclass(frozen=True)
class Bootstraps:
    """Peers that run already, or the one that `swarmnode bootstrap` will start.

    `listen` and `announce` are multiaddrs without /p2p/; an empty `listen` means a free port on loopback.
    """

    running: Sequence[str] = ()
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()

    def settled(self, interfaces: Collection[str] | None = None) -> Bootstraps:
        """The same, with every address one that newcomers can dial: ports chosen, and wildcards replaced by this machine's
        addresses (`interfaces`; default: those it has now). Raises UsageError.
        """
        running = check_all("--bootstrap", self.running, needs_peer=True)
        if running and (self.listen or self.announce):
            raise UsageError("--bootstrap names peers that run already; --listen and --announce are for a new one")
        listen = tuple(map(_with_fixed_port, _of_a_door("--listen", check_all("--listen", self.listen))))
        announce = _of_a_door("--announce", check_all("--announce", self.announce, dialled=True))
        if announce and not listen:
            raise UsageError("--announce says where others reach the bootstrap peer; --listen says where it listens")
        if unknown := [address for address in announce if port_of(address) == 0]:
            raise UsageError(f"--announce {unknown[0]}: nobody can dial port 0; give the port that others reach")
        if not running and not listen:
            listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
        return replace(self, running=running, listen=listen, announce=announce or _reached(listen, interfaces))


def _of_a_door(option: str, addresses: Sequence[str]) -> Sequence[str]:
    """The same, of a bootstrap peer that is still to run. Raises UsageError for one where it could not be dialled."""
    for address in addresses:
        if port_of(address) is None:
            raise UsageError(f"{option} {address}: it names no port; give one like /ip4/203.0.113.7/tcp/4001")
        if peer_of(address) is not None:
            raise UsageError(f"{option} {address}: leave /p2p/ away; a new bootstrap peer gets an identity of its own")
        if is_link_local(address):
            raise UsageError(
                f"{option} {address}: a link-local address leads elsewhere on each machine; give another one"
            )
    return addresses


def _with_fixed_port(address: str) -> str:
    """An invite outlives the process that listens: the port is chosen now."""
    return with_port(address, free_port()) if port_of(address) == 0 else address


def _reached(listen: Sequence[str], interfaces: Collection[str] | None) -> tuple[str, ...]:
    """What is listened on, as others dial it; loopback only where there is nothing else."""
    known = own_interfaces() if interfaces is None else interfaces
    reached = [
        each for address in listen for each in (_expanded(address, known) if is_wildcard(address) else [address])
    ]
    return tuple(address for address in reached if not is_loopback(address)) or tuple(reached)


def _expanded(address: str, interfaces: Collection[str]) -> list[str]:
    """One address for each interface that the wildcard stands for. Link-local ones mean nothing on another machine."""
    of_version_6 = host_of(address) == "::"
    hosts = [host for host in sorted(interfaces) if (":" in host) == of_version_6]
    return [reached for host in hosts if not is_link_local(reached := with_host(address, host))]
