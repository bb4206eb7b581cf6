"""Where chunks of a checkpoint come from: other peers, or the hub that the manifest names."""

from __future__ import annotations

import asyncio
import hashlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Chunk, End, Error, GetChunks
from swarmnode.errors import ErrorCode, PeerError, PeerLost, ProtocolError, refusal
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.swarm.records import manifest as manifests
from swarmnode.swarm.storage.content import CHUNK_BYTES, HASH_BYTES, FileContent

SILENCE_S = 30.0  # for one answer: a chunk at 35 KB/s (a peer that hangs altogether is found by the link's heartbeat)
HASHING_S = 120.0  # for a hash list, which the peer may have to work out from a file of gigabytes first
MAX_WAITING = 16  # answers that came and were not taken yet: more than a run of chunks has


Reply = TypeVar("Reply", bound=Body)


class Source(ABC):
    """Somebody who may have chunks. What it gives is not believed before it is checked."""

    name: str
    last_resort = False  # dear to ask: only while no other source works

    @abstractmethod
    async def hashes(self, file: FileContent) -> Buffer:
        """The file's list of chunk hashes. Raises PeerError or CheckpointError."""

    @abstractmethod
    def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        """Chunks with their numbers, in order. Raises PeerError or CheckpointError."""


def largest_answer_bytes(manifest: manifests.Manifest) -> int:
    """The largest payload that a source may send: a chunk, or the hash list of the largest file."""
    adapters = (adapter.weights for adapter in manifest.adapters or ())
    longest = max(file.chunks() for file in (*manifest.files, *adapters))
    return max(CHUNK_BYTES, longest * HASH_BYTES)


async def ask(
    board: Switchboard,
    peer: PeerId,
    question: Body,
    *,
    payload: Sequence[Buffer] = (),
    silence_s: float = SILENCE_S,
) -> AsyncIterator[tuple[Frame, Body]]:
    """The answers to a question, until the peer ends the conversation; each may take `silence_s`.

    Raises PeerLost, PeerRefused, NetworkDown.
    """
    answers: asyncio.Queue[tuple[Frame, Body] | PeerError | None] = asyncio.Queue()

    def hear(frame: Frame, body: Body) -> None:
        if answers.qsize() >= MAX_WAITING:
            raise ProtocolError("a peer sends more than it was asked for", code=ErrorCode.TOO_LARGE, peer=peer)
        if isinstance(body, Error):
            answers.put_nowait(refusal(body.code, retry_s=body.retry_s, peer=peer))
        else:
            answers.put_nowait(None if isinstance(body, End) else (frame, body))

    channel = await board.call(peer, hear, answers.put_nowait)
    silent = PeerLost(f"peer {peer} did not answer for {silence_s:.0f} s", peer=peer)
    try:
        channel.send(question, payload=payload)
        while True:
            # Not wait_for: before Python 3.12 it loses a cancellation that comes together with an answer.
            alarm = asyncio.get_running_loop().call_later(silence_s, answers.put_nowait, silent)
            try:
                item = await answers.get()
            finally:
                alarm.cancel()
            if item is None:
                return
            if isinstance(item, PeerError):
                raise item
            yield item
    finally:
        channel.close()


async def ask_one(
    board: Switchboard,
    peer: PeerId,
    question: Body,
    kind: type[Reply],
    *,
    payload: Sequence[Buffer] = (),
    silence_s: float = SILENCE_S,
) -> tuple[Reply, Buffer]:
    """Return the first answer of this kind, and its payload. Raises ProtocolError if there is none, PeerLost, PeerRefused,
    NetworkDown."""
    async for frame, body in ask(board, peer, question, payload=payload, silence_s=silence_s):
        if isinstance(body, kind):
            return body, frame.payload
    raise ProtocolError("a peer ended a conversation without an answer", peer=peer)


class PeerSource(Source):
    """A peer of the swarm that says it has weights."""

    def __init__(self, board: Switchboard, peer: PeerId) -> None:
        self.name = peer
        self._board = board

    def __repr__(self) -> str:
        return f"<PeerSource {self.name}>"

    async def hashes(self, file: FileContent) -> Buffer:
        question = GetChunks(file.root, 0, 0)
        async for frame, body in ask(self._board, self.name, question, silence_s=HASHING_S):
            if isinstance(body, Chunk) and body.hashes:
                return frame.payload
        raise ProtocolError("a peer ended a conversation without an answer", peer=self.name)

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        number = first
        async for frame, body in ask(self._board, self.name, GetChunks(file.root, first, count)):
            if not isinstance(body, Chunk) or frame.seq != number or number == first + count:
                raise ProtocolError("a peer sent another chunk than the one asked for", peer=self.name)
            yield number, frame.payload
            number += 1
        if number != first + count:
            raise ProtocolError("a peer sent fewer chunks than asked for", peer=self.name)


class HubSource(Source):
    """The hub that the manifest names, at the revision founded on. Only bytes that are wanted are read, and none is kept here: what
    the disk may hold is for the cache of weights to say."""

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
        """The hub knows no hashes of chunks: the whole file passes by once."""
        hashes = bytearray()
        for number in range(file.chunks()):
            hashes += hashlib.sha256(await self._read(file, number)).digest()
        return hashes

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        for number in range(first, first + count):
            yield number, await self._read(file, number)
