"""The real network: libp2p by hivemind's p2pd, and the table over its calls, behind `interfaces.py`.

p2pd runs as a child process with one identity and one set of ports from start to close. If it dies it is started again: streams
break at once, protocols are registered anew, and the table is joined again through the known peers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swarmnode.errors import LocalError, NetworkDown, PeerError, PeerLost
from swarmnode.net.addressing.addresses import (
    check,
    check_port_free,
    is_public,
    is_relayed,
    of_stranger,
    peer_of,
    port_of,
    with_peer,
    with_ports,
)
from swarmnode.net.addressing.reachability import answering, is_hidden, own_interfaces
from swarmnode.net.clock import Backoff
from swarmnode.net.direct import direct_connections
from swarmnode.net.direct.direct_connections import LOWEST_PORT, DirectConnections
from swarmnode.net.fair_share import Recent, StreamLimits
from swarmnode.net.interfaces import Dht, Network, PeerId, Stream, StreamHandler
from swarmnode.net.libp2p.daemon import Daemon, SocketFolder, raise_descriptor_limit
from swarmnode.net.libp2p.dht import EngineDht
from swarmnode.net.libp2p.from_hivemind import P2P, P2PD, HivemindMultiaddr
from swarmnode.net.libp2p.p2pd_control import AddressGroups, Inbox, P2pdControl
from swarmnode.net.network_config import OPEN_GATE, Gate, NetworkConfig
from swarmnode.net.tasks import Tasks, cancel_and_wait
from swarmnode.net.transport_stream import TransportStream

log = logging.getLogger(__name__)

MAX_KNOWN_PEERS = 32
MAX_DIALLED = 4096
DIAL_TIMEOUT_S = 5.0
MAX_ADDRESSES = 4  # of a peer, dialled at once
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0  # before a peer's addresses are dialled again after none of them led to it
REJOIN_TIMEOUT_S = 5.0
SHORT_LIFE_S = 30.0  # a p2pd that died younger is started again after a longer delay each time
MAX_RESTART_DELAY_S = 5.0
MOST_FAILED_STARTS = 10  # in a row, within some 40 s: then this machine cannot run p2pd
NOT_ADMITTED = "not admitted"
RELAY_TIMEOUT_S = 2.0  # a relay that has not answered by then is not used
SETTLE_S = 4.0


async def prepare(control: P2pdControl, *, settle_s: float = SETTLE_S) -> None:
    """Wait until a young p2pd knows its public address, and close the connections that it opened over relays before: a peer that
    connects anew gets a hole punched."""
    await asyncio.sleep(settle_s)
    for peer, addresses in (await control.connected()).items():
        if all(map(is_relayed, addresses)):
            await control.disconnect(peer)


@dataclass(frozen=True)
class EngineConfig(NetworkConfig):
    """Network settings of this peer, and facts that spare libp2p from finding them out."""

    hidden: bool = False  # no peer can connect directly (`net/addressing/reachability.py`)
    dht_timeout_s: float = 2.0

    def flags(self) -> list[str]:
        """Return the command-line flags of p2pd."""
        flags = [
            f"-id={self.identity_path}",
            f"-hostAddrs={','.join(self.host_maddrs)}",
            f"-natPortMap={int(self.nat_port_map)}",
            f"-autoRelay={int(bool(self.relays))}",
            "-relayDiscovery=0",
            "-autonat=1",
            "-connManager=1",
            "-relay=1",
            f"-relayService={int(self.public)}",  # else every peer that libp2p finds public would relay
            "-persistentConnMaxMsgSize=1048576",
            "-tls=1",
            "-dhtClient=1" if self.client_mode else "-dhtServer=1",
            "-b=0",
            "-idleTimeout=30s",  # p2pd ends by itself if this process dies before the first lasting connection
        ]
        if self.public or self.hidden:
            flags.append(f"-forceReachability{'Public' if self.public else 'Private'}=1")
        if self.announce_maddrs:
            flags.append(f"-announceAddrs={','.join(self.announce_maddrs)}")
        if self.relays:
            flags.append(f"-trustedRelays={','.join(self.relays)}")
        return flags


class Engine(Network):
    """A peer on the real network. If its p2pd dies it is started again with the same identity and ports."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.peer_id: PeerId = ""
        self.restarts = 0
        self._groups = AddressGroups(lambda: self._running().connected())
        self._dht = EngineDht(config, self._groups, timeout_s=config.dht_timeout_s)
        self._folder = SocketFolder()
        self._inbox = Inbox(self._folder.path / "in.sock", self._incoming)
        self._daemon: Daemon | None = None
        self._control: P2pdControl | None = None
        self._p2p: Any = None  # hivemind's client of the same p2pd, for the DHT
        self._handlers: dict[str, StreamHandler] = {}
        # addresses that led into the DHT, for restarts
        self._entry_addresses: Recent[PeerId, str] = Recent(MAX_KNOWN_PEERS)
        self._dialled: Recent[PeerId, None] = Recent(MAX_DIALLED)  # other connected peers came by themselves
        self._tasks = Tasks("engine", on_crash=config.supervisor.ends_peer)
        self._dialling = Tasks("dialling", on_crash=None)  # a peer that stays alone dials again
        self._streams = Tasks("streams", on_crash=config.supervisor.ends_conversation)
        self._unreached = Backoff(
            asyncio.get_running_loop().time, first_s=FIRST_PAUSE_S, ceiling_s=LONGEST_PAUSE_S, forget_s=LONGEST_PAUSE_S
        )
        self._limits = StreamLimits()
        self._direct = DirectConnections(self._handlers.__contains__, self._incoming)
        self._closing = False

    def __repr__(self) -> str:
        return f"<Engine {self.peer_id} {self._daemon!r} restarts={self.restarts}>"

    @property
    def dht(self) -> Dht:
        return self._dht

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Join the network; other peers need not be reachable.

        Raises LocalError if a port is in use or p2pd does not start, UsageError if an address is no multiaddr.
        """
        for address in (*config.host_maddrs, *config.announce_maddrs, *config.relays):
            check(address)
        for address in config.host_maddrs:
            check_port_free(address)
        raise_descriptor_limit()
        engine = cls(config)
        try:
            await engine._inbox.open()
            await engine._start_daemon()
            _, listening = await engine._running().identify()
            engine.config = replace(config, host_maddrs=with_ports(config.host_maddrs, listening))
            if config.direct:
                await engine._direct.start(engine.peer_id, config.host_maddrs)
                await engine.serve(direct_connections.PROTOCOL, engine._direct.answer)
            engine._tasks.spawn(engine._watch(), "watch p2pd")
        except BaseException:
            await engine.close()
            raise
        return engine

    # -- p2pd

    async def _start_daemon(self) -> None:
        self._daemon = await Daemon.start(P2PD, self.config.flags(), self._folder.new_socket("p2pd"))
        control = P2pdControl(self._daemon.socket)
        self.peer_id, _ = await control.identify()
        for protocol in self._handlers:
            await control.serve(protocol, self._inbox.path)
        self._p2p = await _Client.connect(self._daemon.socket, self._folder.path, self.config.gate)
        if self.config.hidden:
            await prepare(control)
        self._control = control  # before the table, whose calls may need an introduction over a link
        await self._dht.start(self._p2p)

    async def _stop_daemon(self) -> None:
        self._control = None
        await self._dht.stop()
        if self._p2p is not None:
            await self._p2p.shutdown()
            self._p2p = None
        if self._daemon is not None:
            await self._daemon.stop()

    async def _watch(self) -> None:
        """Start p2pd again whenever it ends. Raises LocalError after MOST_FAILED_STARTS failed starts in a row."""
        delay_s, failed = 0.0, 0
        while True:
            assert self._daemon is not None
            code = await asyncio.shield(self._daemon.exited)
            delay_s = 0.0 if self._daemon.age_s > SHORT_LIFE_S else min(MAX_RESTART_DELAY_S, 2 * delay_s + 0.1)
            log.warning("p2pd ended with code %s; starting it again", code)
            await self._stop_daemon()
            await asyncio.sleep(delay_s)
            self.restarts += 1
            try:
                await self._start_daemon()
            except Exception as error:  # any failure of a young p2pd: the next one may work
                log.warning("p2pd did not come up: %s", error)
                await self._stop_daemon()
                failed += 1
                if failed == MOST_FAILED_STARTS:
                    raise LocalError(f"p2pd ended and does not come up again: {error}; start the node again") from error
                continue
            failed = 0
            if self._entry_addresses:
                self._dialling.spawn(
                    self.connect(list(self._entry_addresses.values()), timeout_s=REJOIN_TIMEOUT_S), "rejoin"
                )

    def _running(self) -> P2pdControl:
        if self._control is None:
            raise NetworkDown("p2pd is not running; the node starts it again")
        return self._control

    # -- streams

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float, addresses: Sequence[str] = ()) -> Stream:
        self._dialled[peer] = None
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        try:
            return await self._open(peer, protocol, timeout_s=timeout_s)
        except PeerLost:
            if not await self._reach(peer, addresses, timeout_s=end_s - loop.time()):
                raise
        return await self._open(peer, protocol, timeout_s=end_s - loop.time())

    async def _open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + timeout_s
        if self.config.direct:
            direct = await self._direct.open(self._running(), peer, protocol, timeout_s=timeout_s)
            if direct is not None:
                return direct
        left_s = end_s - loop.time()
        if left_s <= 0:  # all of it went into the question for a direct connection
            raise PeerLost(f"peer {peer} cannot be reached in time", peer=peer)
        return await self._running().open(peer, protocol, timeout_s=left_s)

    async def _reach(self, peer: PeerId, addresses: Sequence[str], *, timeout_s: float) -> bool:
        """Dial an unconnected peer at the addresses that it states, and return whether it answered at one of them.

        libp2p's routing finds no peer whose addresses it takes for neither public nor private. As the peer may state addresses of
        others, few are dialled, and seldom, and no ports of system services.
        """
        own = [address for address in of_stranger(addresses, peer) if (port_of(address) or 0) >= LOWEST_PORT]
        if not own or timeout_s <= 0 or self._unreached.pause_s(peer) or await self._running().addresses_of(peer):
            return False
        try:
            await self._running().connect(peer, *own[:MAX_ADDRESSES], timeout_s=min(timeout_s, DIAL_TIMEOUT_S))
        except PeerLost as error:
            log.debug("%s; not dialled again for %.0f s", error, self._unreached.failed(peer))
            return False
        self._unreached.succeeded(peer)
        return True

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        known = protocol in self._handlers
        self._handlers[protocol] = handler
        if not known and self._control is not None:  # else it is registered as soon as p2pd runs again
            await self._control.serve(protocol, self._inbox.path)

    def _incoming(self, stream: TransportStream) -> None:
        self._streams.spawn(self._handle(stream), "incoming")

    async def _handle(self, stream: TransportStream) -> None:
        try:
            stream.group, stream.limits = await self._groups.learn(stream.peer), self._limits
            if self._limits.enter(stream):
                await self._handlers[stream.protocol](stream)
        except PeerError as error:
            log.debug("incoming stream ended: %s", error)
        finally:
            self._limits.leave(stream)
            stream.abort()

    # -- own addresses, and other peers

    async def addresses(self) -> list[str]:
        _, addresses = await self._running().identify()
        return [with_peer(address, self.peer_id) for address in addresses]

    async def connected(self) -> set[PeerId]:
        return set(await self._running().connected())

    async def visitors(self) -> list[str]:
        connected = await self._running().connected()
        dialled = self._dialled.keys() | self._dht.neighbours()
        return [address for peer, addresses in connected.items() if peer not in dialled for address in addresses]

    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        self._running()
        # Each attempt goes on in the background after the first success: more known peers are better.
        attempts = [
            self._dialling.spawn(self._meet(peer, address), f"connect to {address}")
            for address in dict.fromkeys(addresses)
            if (peer := peer_of(address)) is not None and peer != self.peer_id
        ]
        with contextlib.suppress(asyncio.TimeoutError):
            for attempt in asyncio.as_completed(attempts, timeout=timeout_s):
                if await attempt:
                    return True
        return False

    async def _meet(self, peer: PeerId, address: str) -> bool:
        """Dial one address and, if a peer of the DHT answers, join the DHT through it; return whether one did."""
        self._dialled[peer] = None
        try:
            await self._running().connect(peer, address, timeout_s=DIAL_TIMEOUT_S)
            if not await self._dht.meet(peer):
                return False
        except (NetworkDown, PeerLost) as error:
            log.debug("%s", error)
            return False
        self._entry_addresses[peer] = address
        self._dialling.spawn(self._dht.explore(), "explore the DHT")
        return True

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        await self._tasks.close()
        await self._dialling.close()
        await self._streams.close()
        self._inbox.close()
        self._direct.close()
        await self._stop_daemon()
        self._folder.remove()


class _Client(P2P):
    """hivemind's client of the own p2pd; the DHT speaks through it.

    p2pd ends when the lasting connection of this client is closed, also by the death of this process.
    """

    _gate: Gate = OPEN_GATE

    @classmethod
    async def connect(cls, socket: Path, folder: Path, gate: Gate) -> Any:
        # Each client listens on a socket of its own; hivemind wants a prefix that it completes with a random name.
        client: Any = type("Client", (cls,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/", "_gate": gate})
        return await client.replicate(HivemindMultiaddr(f"/unix{socket}"))

    async def add_protobuf_handler(self, name: str, handler: Any, input_protobuf_type: Any, **options: Any) -> None:
        """Register a handler that answers peers that the gate admits; others get NOT_ADMITTED."""

        async def guarded(request: Any, context: Any) -> Any:
            if not self._gate.admits(context.remote_id.to_base58()):
                raise PermissionError(NOT_ADMITTED)
            return await handler(request, context)

        served = guarded if self._gate.guards_table else handler
        await super().add_protobuf_handler(name, served, input_protobuf_type, **options)

    async def call_protobuf_handler(self, peer_id: Any, name: str, input: Any, output_protobuf_type: Any) -> Any:
        """Call a peer of the table, after an introduction if tables are guarded; again if the peer has restarted and forgotten this
        one."""
        if not self._gate.guards_table:
            return await super().call_protobuf_handler(peer_id, name, input, output_protobuf_type)
        peer = peer_id.to_base58()
        await self._gate.introduce(peer)
        try:
            return await super().call_protobuf_handler(peer_id, name, input, output_protobuf_type)
        except Exception as error:  # hivemind raises errors of its own kinds with the text of the other side
            if NOT_ADMITTED not in str(error):
                raise
        await self._gate.introduce(peer, anew=True)
        return await super().call_protobuf_handler(peer_id, name, input, output_protobuf_type)

    async def shutdown(self) -> None:
        """Shut down, also after p2pd's death, without errors about the connection lost with it."""
        await super().shutdown()
        tasks = (self._client.control._read_task, self._client.control._write_task)
        await cancel_and_wait(*(task for task in tasks if task is not None))


async def start_engine(config: NetworkConfig) -> Engine:
    """Join the real network. Raises LocalError if a port is in use or p2pd does not start, UsageError if a setting is not valid."""
    relays = tuple(await answering(config.relays, timeout_s=RELAY_TIMEOUT_S))
    mapped = bool(config.announce_maddrs) or config.nat_port_map
    hidden = not mapped and any(map(is_public, relays)) and is_hidden(config.host_maddrs, own_interfaces())
    return await Engine.start(EngineConfig(**{**vars(config), "relays": relays, "hidden": hidden}))
