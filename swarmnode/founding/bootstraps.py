"""Bootstrap peers of a new swarm: their addresses are checked, and made such that newcomers can dial them, before anything
is written."""

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
    """The bootstrap peers of a new swarm: peers that already run (`running`), or the peer that `swarmnode host --door-only` will
    start.

    `listen` and `announce` are multiaddrs without /p2p/. If `running` and `listen` are empty, the new peer gets a free port
    on loopback.
    """

    running: Sequence[str] = ()
    listen: Sequence[str] = ()
    announce: Sequence[str] = ()

    def settled(self, interfaces: Collection[str] | None = None) -> Bootstraps:
        """Return a copy whose addresses newcomers can dial: ports are chosen, and wildcards replaced by this machine's
        addresses.

        `interfaces` are this machine's addresses; None looks them up. Raises UsageError if an address is invalid or the
        options contradict each other.
        """
        running = check_all("--bootstrap", self.running, needs_peer=True)
        if running and (self.listen or self.announce):
            raise UsageError("--bootstrap names peers that run already; --listen and --announce are for a new one")
        listen = tuple(map(_with_fixed_port, _of_a_door("--listen", check_all("--listen", self.listen))))
        announce = _of_a_door("--announce", check_all("--announce", self.announce, dialled=True))
        if announce and not listen:
            raise UsageError("--announce says where others reach the bootstrap peer; --listen says where it listens")
        if unknown := [address for address in announce if port_of(address) == 0]:
            raise UsageError(f"--announce {unknown[0]}: port 0 cannot be dialled; give the port that others reach")
        if not running and not listen:
            listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
        return replace(self, running=running, listen=listen, announce=announce or _reached(listen, interfaces))


def _of_a_door(option: str, addresses: Sequence[str]) -> Sequence[str]:
    """Check the addresses of a bootstrap peer that is still to be started, and return them.

    Raises UsageError if one lacks a port, contains /p2p/ or is link-local.
    """
    for address in addresses:
        if port_of(address) is None:
            raise UsageError(f"{option} {address}: it names no port; give one like /ip4/203.0.113.7/tcp/4001")
        if peer_of(address) is not None:
            raise UsageError(f"{option} {address}: leave out /p2p/; a new bootstrap peer gets an identity of its own")
        if is_link_local(address):
            raise UsageError(
                f"{option} {address}: a link-local address leads elsewhere on each machine; give another one"
            )
    return addresses


def _with_fixed_port(address: str) -> str:
    """Replace port 0 by a free port: the invite outlives the process that listens."""
    return with_port(address, free_port()) if port_of(address) == 0 else address


def _reached(listen: Sequence[str], interfaces: Collection[str] | None) -> tuple[str, ...]:
    """Return the addresses in `listen` as others dial them; those on loopback only if there are no others."""
    known = own_interfaces() if interfaces is None else interfaces
    reached = [
        each for address in listen for each in (_expanded(address, known) if is_wildcard(address) else [address])
    ]
    return tuple(address for address in reached if not is_loopback(address)) or tuple(reached)


def _expanded(address: str, interfaces: Collection[str]) -> list[str]:
    """Replace the wildcard by each interface's address of its IP version, without link-local ones, which mean nothing elsewhere."""
    of_version_6 = host_of(address) == "::"
    hosts = [host for host in sorted(interfaces) if (":" in host) == of_version_6]
    return [reached for host in hosts if not is_link_local(reached := with_host(address, host))]
