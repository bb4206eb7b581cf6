"""The real network: libp2p by hivemind's p2pd, and hivemind's Kademlia table. The only file that imports hivemind.

Everything of hivemind stays behind `interfaces.py`, so that the engine can be exchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multiaddr import Multiaddr

from swarmnode.errors import LocalError, NetworkDown, PeerLost
from swarmnode.net.addresses import check, check_port_free, peer_of, with_peer, without_peer
from swarmnode.net.daemon import Daemon, SocketFolder
from swarmnode.net.interfaces import Dht, Network, PeerId, Record, RecordValidator, Stream, StreamHandler
from swarmnode.net.socket_stream import SocketStream, write_varint
from swarmnode.net.tasks import Tasks


@contextlib.contextmanager
def _bare_package(name: str) -> Iterator[None]:
    """Import submodules of a package without running its `__init__`.

    hivemind's own imports its training side too (averaging, optimisers, scipy): 0.5 s and 50 MB that a node does not use.
    The package is left as if never imported, so a later plain `import hivemind` works as always.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is None or spec.submodule_search_locations is None:
        yield
        return
    package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package
    try:
        yield
    finally:
        del sys.modules[name]


with _bare_package("hivemind"):
    import hivemind.hivemind_cli as hivemind_cli
    from hivemind.dht.node import DHTNode
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P, PeerID
    from hivemind.proto import p2pd_pb2
    from hivemind.utils.multiaddr import Multiaddr as HivemindMultiaddr
    from hivemind.utils.serializer import MSGPackSerializer

log = logging.getLogger(__name__)
logging.getLogger("hivemind").setLevel(logging.CRITICAL)  # its warnings are our normal life: peers come and go

P2PD = Path(hivemind_cli.__path__[0]) / "p2pd"
MAX_RECORD_BYTES = 4096
MAX_KNOWN_PEERS = 32


@dataclass(frozen=True)
class EngineConfig:
    """How this peer is on the network. Addresses are multiaddrs without /p2p/; the identity file must exist."""

    identity_path: Path
    host_maddrs: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce_maddrs: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()  # static relays (with /p2p/) to be reached through, for a peer behind NAT
    client_mode: bool = False  # uses the DHT without being a part of it
    nat_port_map: bool = False
    record_validator: RecordValidator | None = None
    dht_timeout_s: float = 2.0
    replicas: int = 5

    def flags(self) -> list[str]:
        """p2pd's command line."""
        flags = [
            f"-id={self.identity_path}",
            f"-hostAddrs={','.join(self.host_maddrs)}",
            f"-natPortMap={int(self.nat_port_map)}",
            f"-autoRelay={int(bool(self.relays))}",
            f"-relayDiscovery={0}",
            "-autonat=1",
            "-connManager=1",
            "-relay=1",
            "-tls=1",
            "-dhtClient=1" if self.client_mode else "-dhtServer=1",
            "-b=0",
        ]
        if self.announce_maddrs:
            flags.append(f"-announceAddrs={','.join(self.announce_maddrs)}")
        if self.relays:
            flags.append(f"-trustedRelays={','.join(self.relays)}")
        return flags


class _Validator(RecordValidatorBase):
    """hivemind's question put to our callable. Keys come as their hashes: what is believed rests on the value alone."""

    def __init__(self, valid: RecordValidator | None) -> None:
        self._valid = valid

    def validate(self, record: DHTRecord) -> bool:
        if len(record.value) > MAX_RECORD_BYTES:
            return False
        try:
            subkey, value = MSGPackSerializer.loads(record.subkey), MSGPackSerializer.loads(record.value)
        except Exception as error:  # msgpack raises many kinds on bytes of strangers
            log.debug("refused a DHT record that cannot be read: %s", error)
            return False
        if not isinstance(subkey, bytes) or not isinstance(value, bytes):
            return False
        return self._valid is None or self._valid(record.key, subkey, value, record.expiration_time)


class EngineDht(Dht):
    """hivemind's DHTNode, of which there is a new one after each restart of p2pd."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __repr__(self) -> str:
        return f"<EngineDht of {self._engine.peer_id}>"

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        node = self._engine.node
        if node is None:
            raise NetworkDown("p2pd is not running")
        return bool(await node.store(key, value, expires_at, subkey=subkey))

    async def get(self, keys: Sequence[bytes]) -> Mapping[bytes, Mapping[bytes, Record]]:
        node = self._engine.node
        if node is None:
            raise NetworkDown("p2pd is not running")
        found = await node.get_many(list(keys), sufficient_expiration_time=float("inf"))
        return {key: _records(found.get(key)) for key in keys}


def _records(found: Any) -> dict[bytes, Record]:
    entries = getattr(found, "value", None)
    if not isinstance(entries, Mapping):
        return {}
    return {
        subkey: Record(entry.value, entry.expiration_time)
        for subkey, entry in entries.items()
        if isinstance(subkey, bytes) and isinstance(entry.value, bytes)
    }


class Engine(Network):
    """A peer on the real network. Its p2pd is watched: one that dies is started again with the same identity and port."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.peer_id: PeerId = ""
        self.node: Any = None  # hivemind's DHTNode while p2pd runs
        self.restarts = 0
        self._dht = EngineDht(self)
        self._dht_id = DHTID.generate()
        self._folder = SocketFolder()
        self._daemon: Daemon | None = None
        self._p2p: Any = None
        self._server: asyncio.AbstractServer | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._known: dict[PeerId, str] = {}  # addresses that led somewhere, to come back by after a restart
        self._tasks = Tasks("engine")
        self._streams = Tasks("streams")
        self._closing = False

    def __repr__(self) -> str:
        return f"<Engine {self.peer_id} {self._daemon!r} restarts={self.restarts}>"

    @property
    def dht(self) -> Dht:
        return self._dht

    @classmethod
    async def start(cls, config: EngineConfig) -> Engine:
        """Come up. Raises LocalError where a port is in use or p2pd does not start; nobody else need be reachable."""
        for address in (*config.host_maddrs, *config.announce_maddrs, *config.relays):
            check(address)
        for address in config.host_maddrs:
            check_port_free(address)
        engine = cls(config)
        try:
            engine._server = await asyncio.get_running_loop().create_unix_server(
                lambda: SocketStream(engine._incoming), str(engine._inbox)
            )
            await engine._start_daemon()
            engine.config = replace(config, host_maddrs=await engine._listen_addresses())
            engine._tasks.spawn(engine._watch(), "watch p2pd")
        except BaseException:
            await engine.close()
            raise
        return engine

    # -- p2pd

    @property
    def _inbox(self) -> Path:
        return self._folder.path / "in.sock"

    async def _start_daemon(self) -> None:
        self._daemon = await Daemon.start(P2PD, self.config.flags(), self._folder.path / "p2pd.sock")
        self._p2p = await _Client.connect(self._daemon.socket, self._folder.path)
        self.peer_id = self._p2p.peer_id.to_base58()
        self.node = await DHTNode.create(
            p2p=self._p2p,
            node_id=self._dht_id,
            client_mode=self.config.client_mode,
            num_replicas=self.config.replicas,
            wait_timeout=self.config.dht_timeout_s,
            record_validator=_Validator(self.config.record_validator),
            cache_locally=False,  # readers want what is true now
            cache_nearest=0,
            cache_on_store=False,
            cache_refresh_before_expiry=0,
        )
        for protocol in self._handlers:
            await self._register(protocol)

    async def _watch(self) -> None:
        while True:
            assert self._daemon is not None
            code = await asyncio.shield(self._daemon.exited)
            log.warning("p2pd ended with code %s; starting it again", code)
            self.node = None
            if self._p2p is not None:
                await self._p2p.shutdown()
            self.restarts += 1
            await self._restart()

    async def _restart(self) -> None:
        delay_s = 0.1
        while True:
            try:
                await self._start_daemon()
                break
            except LocalError as error:
                log.warning("%s; next try in %.1f s", error, delay_s)
                await asyncio.sleep(delay_s)
                delay_s = min(5.0, 2 * delay_s)
        if self._known:
            await self.connect(list(self._known.values()), timeout_s=5.0)

    async def _request(self, request: Any, on_preamble: Any = lambda _stream: None) -> tuple[SocketStream, Any]:
        """Ask p2pd something on a connection of its own, which may become a stream. Raises NetworkDown."""
        if self._daemon is None or self._daemon.exited.done():
            raise NetworkDown("p2pd is not running")
        data = request.SerializeToString()
        try:
            _, stream = await asyncio.get_running_loop().create_unix_connection(
                lambda: SocketStream(on_preamble), str(self._daemon.socket)
            )
        except OSError as error:
            raise NetworkDown(f"p2pd does not answer: {error}") from error
        try:
            stream.write([write_varint(len(data)) + data])
            response = p2pd_pb2.Response()
            response.ParseFromString(await stream.preamble())
        except BaseException:
            stream.abort()
            raise
        return stream, response

    async def _register(self, protocol: str) -> None:
        # py-multiaddr drops the leading slash of a unix path, hivemind's own keeps it
        inbox = HivemindMultiaddr(f"/unix{self._inbox}").to_bytes()
        handler = p2pd_pb2.StreamHandlerRequest(addr=inbox, proto=[protocol], balanced=False)
        stream, response = await self._request(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=handler)
        )
        stream.abort()
        if response.type != p2pd_pb2.Response.OK:
            raise LocalError(f"p2pd refused the protocol {protocol}: {response.error.msg}")

    # -- streams

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float) -> Stream:
        try:
            target = PeerID.from_base58(peer).to_bytes()
        except ValueError as error:
            raise PeerLost(f"{peer!r} is not a peer id", peer=peer) from error
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(peer=target, proto=[protocol], timeout=max(1, round(timeout_s))),
        )
        try:
            stream, response = await asyncio.wait_for(self._request(request), timeout_s)
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {peer} cannot be reached within {timeout_s:.0f} s", peer=peer) from None
        if response.type != p2pd_pb2.Response.OK:
            stream.abort()
            reason = response.error.msg.partition("\n")[0]
            raise PeerLost(f"peer {peer} cannot be reached: {reason}", peer=peer)
        stream.peer, stream.protocol = peer, protocol
        return stream

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        known = protocol in self._handlers
        self._handlers[protocol] = handler
        if not known:
            await self._register(protocol)

    def _incoming(self, stream: SocketStream) -> None:
        """p2pd has connected to our socket: its preamble says who it is for."""
        self._streams.spawn(self._handle(stream), "incoming")

    async def _handle(self, stream: SocketStream) -> None:
        info = p2pd_pb2.StreamInfo()
        try:
            info.ParseFromString(await stream.preamble())
            stream.peer, stream.protocol = PeerID(info.peer).to_base58(), info.proto
            await self._handlers[stream.protocol](stream)
        except (PeerLost, KeyError) as error:
            log.debug("incoming stream ended: %s", error)
        finally:
            stream.abort()

    # -- where we are, and who else is there

    async def _listen_addresses(self) -> tuple[str, ...]:
        """What p2pd listens on now, with the ports that it picked."""
        _, addresses = await self._p2p._client.identify()
        listening = [str(address) for address in addresses]
        hosts = {address.split("/")[2] for address in self.config.host_maddrs}
        own = tuple(address for address in listening if address.split("/")[2] in hosts)
        if "0.0.0.0" in hosts and not own:
            ports = {address.split("/")[4] for address in listening if "/tcp/" in address}
            own = tuple(f"/ip4/0.0.0.0/tcp/{port}" for port in sorted(ports))
        return own or self.config.host_maddrs

    async def addresses(self) -> list[str]:
        if self._p2p is None or self.node is None:
            raise NetworkDown("p2pd is not running")
        _, addresses = await self._p2p._client.identify()
        return [with_peer(str(address), self.peer_id) for address in addresses]

    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        attempts = [
            asyncio.ensure_future(self._connect(address))
            for address in dict.fromkeys(addresses)
            if peer_of(address) not in (None, self.peer_id)
        ]
        try:
            for attempt in asyncio.as_completed(attempts, timeout=timeout_s):
                with contextlib.suppress(asyncio.TimeoutError):
                    if await attempt:
                        return True
            return False
        except asyncio.TimeoutError:
            return False
        finally:
            for attempt in attempts:
                attempt.cancel()
            await asyncio.gather(*attempts, return_exceptions=True)

    async def _connect(self, address: str) -> bool:
        """Dial one address and, where a DHT peer answers, learn our neighbourhood from it."""
        peer = peer_of(address)
        if peer is None or self.node is None:
            return False
        target = PeerID.from_base58(peer)
        request = p2pd_pb2.ConnectRequest(
            peer=target.to_bytes(), addrs=[Multiaddr(without_peer(address)).to_bytes()], timeout=5
        )
        try:
            stream, response = await self._request(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))
            stream.abort()
        except (NetworkDown, PeerLost) as error:
            log.debug("cannot dial %s: %s", address, error)
            return False
        if response.type != p2pd_pb2.Response.OK:
            log.debug("cannot dial %s: %s", address, response.error.msg)
            return False
        node = self.node
        if node is None or await node.protocol.call_ping(target, validate=False) is None:
            return False
        self._known[peer] = address
        while len(self._known) > MAX_KNOWN_PEERS:
            self._known.pop(next(iter(self._known)))
        await node.find_nearest_nodes([node.node_id])
        return True

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        await self._tasks.close()
        await self._streams.close()
        if self._server is not None:
            self._server.close()
        if self._p2p is not None:
            await self._p2p.shutdown()
        if self._daemon is not None:
            await self._daemon.stop()
        self._folder.remove()


class _Client(P2P):
    """hivemind's client of a p2pd that we started ourselves; the DHT speaks through it."""

    @classmethod
    async def connect(cls, socket: Path, folder: Path) -> Any:
        # Each client listens on a socket of its own; hivemind wants a prefix that it completes with a random name.
        client: Any = type("Client", (cls,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
        return await client.replicate(HivemindMultiaddr(f"/unix{socket}"))
