"""Sources of a checkpoint's chunks: other peers, or the hub that the manifest names."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

from swarmnode.codec.messages import Chunk, GetChunks
from swarmnode.errors import ProtocolError
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.peer.questions import ask, ask_one
from swarmnode.swarm.records import manifest as manifests
from swarmnode.swarm.storage.content import CHUNK_BYTES, HASH_BYTES, FileContent

HASHING_S = 120.0  # for a hash list, which the peer may first have to compute from a file of gigabytes


class Source(ABC):
    """A peer or hub that may have chunks. Its data is untrusted until it is verified."""

    name: str
    last_resort = False  # expensive: asked only while no other source works

    @abstractmethod
    async def hashes(self, file: FileContent) -> Buffer:
        """Fetch the file's list of chunk hashes.

        Args:
            file: the file, which the source knows by its root hash.

        Returns:
            The SHA-256 digests of its chunks, joined in order; unverified.

        Raises:
            PeerError: if a peer fails or refuses.
            CheckpointError: if a hub or a local file fails.
        """

    @abstractmethod
    def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        """Yield chunks of the file in order.

        Args:
            file: the file, which the source knows by its root hash.
            first: number of the first chunk.
            count: how many chunks.

        Returns:
            Pairs of a chunk's number and its bytes; unverified.

        Raises:
            PeerError: if a peer fails or refuses.
            CheckpointError: if a hub or a local file fails.
        """


def largest_answer_bytes(manifest: manifests.Manifest) -> int:
    """Return the size of the largest payload that a source may send: a chunk, or the hash list of the largest file."""
    adapters = (adapter.weights for adapter in manifest.adapters or ())
    longest = max(file.chunks() for file in (*manifest.files, *adapters))
    return max(CHUNK_BYTES, longest * HASH_BYTES)


class PeerSource(Source):
    """A peer of the swarm that announces weights."""

    def __init__(self, board: Switchboard, peer: PeerId) -> None:
        self.name = peer
        self._board = board

    def __repr__(self) -> str:
        return f"<PeerSource {self.name}>"

    async def hashes(self, file: FileContent) -> Buffer:
        question = GetChunks(file.root, 0, 0)
        _, hashes = await ask_one(self._board, self.name, question, Chunk, silence_s=HASHING_S)
        return hashes

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        number = first
        async for frame, body in ask(self._board, self.name, GetChunks(file.root, first, count)):
            if not isinstance(body, Chunk) or frame.seq != number or number == first + count:
                raise ProtocolError("it sent another chunk than the requested one", peer=self.name)
            yield number, frame.payload
            number += 1
        if number != first + count:
            raise ProtocolError("it sent fewer chunks than requested", peer=self.name)


class HubSource(Source):
    """The hub repository that the manifest names, at the revision that the swarm was founded on.

    Only the requested bytes are read, and none are stored here: the cache of weights bounds the disk.
    """

    last_resort = True

    def __init__(self, model: manifests.ModelInfo) -> None:
        assert model.hub_id is not None
        self.name = model.hub_id
        self._revision = model.revision

    def __repr__(self) -> str:
        return f"<HubSource {self.name}>"

    async def _read(self, file: FileContent, number: int) -> bytes:
        from swarmnode.compute.model.hub import read_range

        first, size = number * CHUNK_BYTES, file.chunk_size(number)
        return await asyncio.to_thread(read_range, self.name, file.name, first, size, revision=self._revision)

    async def hashes(self, file: FileContent) -> Buffer:
        """Read the whole file once and hash its chunks, since the hub has no chunk hashes."""
        hashes = bytearray()
        for number in range(file.chunks()):
            hashes += hashlib.sha256(await self._read(file, number)).digest()
        return hashes

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        for number in range(first, first + count):
            yield number, await self._read(file, number)
