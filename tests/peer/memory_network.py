"""Peers in one process: streams are queues, and everybody hears everybody."""

import asyncio

from swarmnode.errors import PeerLost
from swarmnode.net.interfaces import Network, Stream


class MemoryStream(Stream):
    def __init__(self, peer, protocol):
        self.peer = peer
        self.protocol = protocol
        self.other = None
        self.written_bytes = 0
        self._inbox = asyncio.Queue()
        self._rest = b""  # of what was taken from the inbox and did not fit

    async def read(self):
        data = self._rest or await self._inbox.get()
        self._rest = b""
        if data is None:
            raise PeerLost("reset", peer=self.peer)
        return data

    async def read_into(self, buffer):
        data = await self.read()
        count = min(len(data), len(buffer))
        buffer[:count] = data[:count]
        self._rest = data[count:]
        return count

    def write(self, buffers):
        data = b"".join(buffers)
        self.written_bytes += len(data)
        self.other._inbox.put_nowait(data)

    @property
    def unsent_bytes(self):
        return 0  # it takes everything at once

    async def drain(self):
        await asyncio.sleep(0)

    async def close(self):
        self.other._inbox.put_nowait(b"")

    def abort(self):
        self._inbox.put_nowait(None)
        self.other._inbox.put_nowait(None)


class MemoryNetwork(Network):
    def __init__(self, peers, peer_id):
        self.peer_id = peer_id
        self.received_bytes = 0
        self._peers = peers
        self._handlers = {}
        self._tasks = []
        self._streams = []
        peers[peer_id] = self

    @property
    def dht(self):
        raise NotImplementedError

    async def open(self, peer, protocol, *, timeout_s, addresses=()):
        handler = self._peers[peer]._handlers.get(protocol) if peer in self._peers else None
        if handler is None:
            raise PeerLost(f"peer {peer} cannot be reached", peer=peer)
        here, there = MemoryStream(peer, protocol), MemoryStream(self.peer_id, protocol)
        here.other, there.other = there, here
        self._streams.append(here)
        self._peers[peer]._tasks.append(asyncio.create_task(handler(there)))
        return here

    def received(self):
        """Bytes that came over the streams opened here."""
        return sum(stream.other.written_bytes for stream in self._streams)

    async def serve(self, protocol, handler):
        self._handlers[protocol] = handler

    async def addresses(self):
        return []

    async def connected(self):
        return set(self._peers) - {self.peer_id}

    async def visitors(self):
        return []

    async def connect(self, addresses, *, timeout_s):
        return True

    async def close(self):
        for stream in self._streams:
            stream.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._peers.pop(self.peer_id, None)
