"""A network in one process, for tests and experiments: peers with latency, rate and loss between them, that can die and hang.

It keeps the contract of `interfaces.py` as the real network does, and passes the same conformance suite. With `virtual_time` a run
depends on its seed alone. Example:

    world = FakeWorld(seed=1)
    alice, bob = world.join(), world.join()
    world.set_path(alice.peer_id, bob.peer_id, Path(latency_s=0.05, bytes_per_s=1e6))
    await alice.connect(await bob.addresses(), timeout_s=1)
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence

from swarmnode.errors import NetworkDown, PeerError, PeerLost
from swarmnode.net.addressing.addresses import address_group, of_stranger, peer_of, without_peer
from swarmnode.net.fair_share import StreamLimits
from swarmnode.net.identity import Identity
from swarmnode.net.interfaces import (
    MAX_RECORD_BYTES,
    Dht,
    Enough,
    Network,
    PeerId,
    Record,
    RecordValidator,
    Stream,
    StreamHandler,
    key_digest,
)
from swarmnode.net.memory.medium import FakeStream, Island, Medium, connect
from swarmnode.net.network_config import OPEN_GATE, Gate, NetworkConfig
from swarmnode.net.tasks import Supervisor, Tasks, cancel_and_wait

log = logging.getLogger(__name__)


class FakeWorld(Medium):
    """All peers and the paths between them. `clock` gives unix time in seconds, for the expiry of records."""

    def __init__(self, seed: int = 0, clock: Callable[[], float] = time.time) -> None:
        super().__init__(random.Random(seed))
        self.clock = clock
        self._hosts = (str(host) for host in ipaddress.ip_network("10.0.0.0/8").hosts())
        self._homes: dict[PeerId, str] = {}  # listening address of each peer that ever joined
        self._connections: set[frozenset[PeerId]] = set()
        self._networks: dict[PeerId, FakeNetwork] = {}

    def join(
        self,
        *,
        identity: Identity | None = None,
        record_validator: RecordValidator | None = None,
        client_mode: bool = False,
        gate: Gate = OPEN_GATE,
        supervisor: Supervisor | None = None,
        host: str | None = None,
    ) -> FakeNetwork:
        """Add a peer at the IP address `host` (by default the next free one), or one that comes back by its `identity`. It is alone
        until it connects."""
        identity = identity or Identity(self._random.randbytes(32))
        address = self._homes.setdefault(identity.peer_id, f"/ip4/{host or next(self._hosts)}/tcp/4001")
        supervisor = supervisor or Supervisor()
        network = FakeNetwork(
            self, identity, address, record_validator, client_mode=client_mode, gate=gate, supervisor=supervisor
        )
        self._networks[network.peer_id] = network
        return network

    async def start(self, config: NetworkConfig) -> FakeNetwork:
        """Add a peer with these settings, as a `StartNetwork`; the world chooses its address."""
        return self.join(
            identity=Identity.load_or_create(config.identity_path),
            record_validator=config.record_validator,
            client_mode=config.client_mode,
            gate=config.gate,
            supervisor=config.supervisor,
        )

    def kill(self, peer: PeerId) -> None:
        """Kill a peer as by kill -9: its streams break, and the others notice after the latency."""
        network = self._networks[peer]
        self.leave(peer)
        self.wake(peer)
        network.die()

    # -- what peers ask of the world

    def find(self, peer: PeerId) -> FakeNetwork | None:
        """Return the network of a living peer; None if there is none."""
        return self._networks.get(peer)

    def leave(self, peer: PeerId) -> None:
        """Remove `peer` from the world and close its connections."""
        self._networks.pop(peer, None)
        self._connections = {pair for pair in self._connections if peer not in pair}

    def record_connection(self, peer: PeerId, other: PeerId) -> None:
        """Record that two peers are connected, for as long as both live."""
        self._connections.add(frozenset((peer, other)))

    def connected(self, peer: PeerId) -> set[PeerId]:
        """Return the peers connected with `peer`."""
        return {other for pair in self._connections if peer in pair for other in pair if other != peer}


class FakeDht(Dht):
    """DHT of a FakeNetwork, as seen by one peer: it reaches the peers on the same side of a partition."""

    def __init__(self, network: FakeNetwork) -> None:
        self._network = network

    async def store(self, key: bytes, subkey: bytes, value: bytes, *, expires_at: float) -> bool:
        others = await self._network.table_neighbours()
        if not self._network.believes(key, subkey, value, expires_at):
            return False
        takers = [other for other in others if other.believes(key, subkey, value, expires_at)]
        return self._network.island.store(key, subkey, Record(value, expires_at)) and bool(takers)

    async def get(
        self, keys: Sequence[bytes], *, enough: Enough | None = None
    ) -> Mapping[bytes, Mapping[bytes, Record]]:
        answering = await self._network.table_neighbours()
        alone = not answering and self._network.has_neighbours
        return {key: {} if alone else dict(self._believed(key)) for key in keys}

    async def population(self) -> float:
        return float(1 + len(await self._network.table_neighbours()))

    def _believed(self, key: bytes) -> list[tuple[bytes, Record]]:
        records = self._network.island.records.get(key, {})
        return [
            (subkey, record)
            for subkey, record in records.items()
            if self._network.believes(key, subkey, record.value, record.expires_at)
        ]


class FakeNetwork(Network):
    """Network of one peer in a FakeWorld, with the interface of the real network."""

    def __init__(
        self,
        world: FakeWorld,
        identity: Identity,
        address: str,
        valid: RecordValidator | None,
        *,
        client_mode: bool,
        gate: Gate,
        supervisor: Supervisor,
    ) -> None:
        self.identity = identity
        self.client_mode = client_mode
        self.gate = gate
        self.peer_id = identity.peer_id
        self.island = Island(() if client_mode else (self.peer_id,))
        self._world = world
        self.address = f"{address}/p2p/{self.peer_id}"
        self._valid = valid
        self._dht = FakeDht(self)
        self._dialled: set[PeerId] = set()  # other connected peers came by themselves
        self._handlers: dict[str, StreamHandler] = {}
        self._streams: list[FakeStream] = []
        self._tasks = Tasks("streams", on_crash=supervisor.ends_conversation)
        self._limits = StreamLimits(lambda: asyncio.get_running_loop().time())
        self._down = False

    @property
    def dht(self) -> Dht:
        return self._dht

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float, addresses: Sequence[str] = ()) -> Stream:
        self._check_up()
        try:
            await asyncio.wait_for(self._round_trip(peer), timeout_s)
        except asyncio.TimeoutError:
            raise PeerLost(f"peer {peer} cannot be reached within {timeout_s:.0f} s", peer=peer) from None
        target = self._world.find(peer)
        known = peer in self.island.peers | self._world.connected(self.peer_id)
        if target is None or not (known or target.address in of_stranger(addresses, peer)):
            raise PeerLost(f"peer {peer} cannot be reached", peer=peer)
        self._record_dialled(peer)
        near, far = connect(self.peer_id, peer, protocol, self._world.deliver)
        target.accept(far)
        self._add_stream(near)
        return near

    def _add_stream(self, stream: FakeStream) -> None:
        self._streams = [stream, *(other for other in self._streams if not other.over)]

    async def _round_trip(self, peer: PeerId) -> None:
        await self._world.travel(self.peer_id, peer)
        await self._world.travel(peer, self.peer_id)

    def accept(self, stream: FakeStream) -> None:
        """Take a stream that another peer opened. Raises PeerLost if its protocol is not served here."""
        handler = self._handlers.get(stream.protocol)
        if handler is None:
            raise PeerLost(f"peer {self.peer_id} does not speak {stream.protocol}", peer=self.peer_id)
        opener = self._world.find(stream.peer)
        stream.group, stream.limits = address_group(opener.address) if opener is not None else stream.peer, self._limits
        if not self._limits.enter(stream):
            stream.abort()
            return
        self._add_stream(stream)
        self._tasks.spawn(self._handle(handler, stream), stream.protocol)

    async def _handle(self, handler: StreamHandler, stream: FakeStream) -> None:
        try:
            await handler(stream)
        except PeerError as error:
            log.debug("incoming stream ended: %s", error)
        finally:
            self._limits.leave(stream)
            stream.abort()

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        self._handlers[protocol] = handler

    async def addresses(self) -> list[str]:
        self._check_up()
        return [self.address]

    async def connect(self, addresses: Sequence[str], *, timeout_s: float) -> bool:
        self._check_up()
        peers = [peer for address in addresses if (peer := peer_of(address)) not in (None, self.peer_id)]
        attempts = [asyncio.ensure_future(self._meet(peer)) for peer in peers if peer is not None]
        try:
            for attempt in asyncio.as_completed(attempts, timeout=timeout_s):
                if await attempt:
                    return True
        except asyncio.TimeoutError:
            pass
        finally:
            await cancel_and_wait(*attempts)
        return False

    async def _meet(self, peer: PeerId) -> bool:
        """Dial a peer and, if it answers for the table, join its island; return whether it did."""
        await self._round_trip(peer)
        other = self._world.find(peer)
        if other is None:
            return False
        self._record_dialled(peer)
        if other.client_mode or not await self._is_answered_by(other):
            return False
        if self.client_mode:
            self.island = other.island
        elif other.island is not self.island:
            other.island.absorb(self.island)
            for member in self.island.peers:
                if (network := self._world.find(member)) is not None:
                    network.island = other.island
        return True

    def _record_dialled(self, peer: PeerId) -> None:
        self._dialled.add(peer)
        self._world.record_connection(self.peer_id, peer)

    async def connected(self) -> set[PeerId]:
        self._check_up()
        return self._world.connected(self.peer_id)

    async def visitors(self) -> list[str]:
        self._check_up()
        called = self._dialled | self.island.peers
        came = (self._world.find(peer) for peer in sorted(self._world.connected(self.peer_id) - called))
        return [without_peer(network.address) for network in came if network is not None]

    @property
    def has_neighbours(self) -> bool:
        """Whether there is another living peer in the island, even one that does not answer this peer."""
        return any(self._world.find(peer) is not None for peer in self.island.peers - {self.peer_id})

    async def table_neighbours(self) -> list[FakeNetwork]:
        """Return the other living peers of the island that answer this peer, after the time of one question."""
        self._check_up()
        await asyncio.sleep(2 * self._world.default_path.latency_s)
        await self._world.awake(self.peer_id)
        found = (self._world.find(peer) for peer in sorted(self.island.peers - {self.peer_id}))
        return [other for other in list(found) if other is not None and await self._is_answered_by(other)]

    async def _is_answered_by(self, other: FakeNetwork) -> bool:
        """Return whether a peer answers this peer's calls of the table, after an introduction if tables are guarded."""
        for anew in (False, True):
            if self.gate.guards_table:
                try:
                    await self.gate.introduce(other.peer_id, anew=anew)
                except (PeerError, NetworkDown):
                    return False
            if not other.gate.guards_table or other.gate.admits(self.peer_id):
                return True
        return False

    def believes(self, key: bytes, subkey: bytes, value: bytes, expires_at: float) -> bool:
        """Return whether this peer would keep a record: it is small enough, not expired, and the validator accepts it."""
        if len(value) > MAX_RECORD_BYTES or expires_at <= self._world.clock():
            return False
        return self._valid is None or self._valid(key_digest(key), subkey, value, expires_at)

    def _check_up(self) -> None:
        if self._down:
            raise NetworkDown("this peer has left the network")

    def die(self) -> None:
        """Break all streams at once; the others notice after the latency."""
        self._down = True
        loop = asyncio.get_running_loop()
        for stream in self._streams:
            stream.mute()
            loop.call_later(self._world.path(self.peer_id, stream.peer).latency_s, stream.break_off)
        self._streams.clear()

    async def close(self) -> None:
        if not self._down:
            self._down = True
            self._world.leave(self.peer_id)
            for stream in self._streams:
                stream.abort()
        await self._tasks.close()
