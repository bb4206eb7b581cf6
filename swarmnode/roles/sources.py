"""Where chunks of a checkpoint come from: other peers, or the hub that the manifest names."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnode.codec.frames import Frame
from swarmnode.codec.messages import Body, Chunk, End, Error, GetChunks, GetManifest, Manifest
from swarmnode.errors import CheckpointError, ErrorCode, PeerError, PeerLost, PeerRefused, ProtocolError, refusal
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.net.switchboard import Switchboard
from swarmnode.swarm.content import FileContent, chunk_hashes
from swarmnode.swarm.manifest import ModelInfo

SILENCE_S = 10.0  # a source that sends nothing for so long is given up


class Source(ABC):
    """Somebody who may have chunks. What it gives is not believed before it is checked."""

    name: str

    @abstractmethod
    async def hashes(self, file: FileContent) -> Buffer:
        """The file's list of chunk hashes. Raises PeerError or CheckpointError."""

    @abstractmethod
    def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        """Chunks with their numbers, in order. Raises PeerError or CheckpointError."""


async def ask(board: Switchboard, peer: PeerId, question: Body) -> AsyncIterator[tuple[Frame, Body]]:
    """The answers to a question, until the peer ends the conversation. Raises PeerLost, PeerRefused."""
    answers: asyncio.Queue[tuple[Frame, Body] | PeerError | None] = asyncio.Queue()

    def hear(frame: Frame, body: Body) -> None:
        if isinstance(body, Error):
            answers.put_nowait(refusal(body.code, retry_s=body.retry_s, peer=peer))
        else:
            answers.put_nowait(None if isinstance(body, End) else (frame, body))

    channel = await board.call(peer, hear, answers.put_nowait)
    try:
        channel.send(question)
        while True:
            try:
                item = await asyncio.wait_for(answers.get(), SILENCE_S)
            except asyncio.TimeoutError:
                raise PeerLost(f"peer {peer} did not answer for {SILENCE_S:.0f} s", peer=peer) from None
            if item is None:
                return
            if isinstance(item, PeerError):
                raise item
            yield item
    finally:
        channel.close()


async def ask_for_manifest(board: Switchboard, peer: PeerId) -> bytes:
    """A peer's manifest, not checked yet. Raises PeerError."""
    async for frame, body in ask(board, peer, GetManifest()):
        if isinstance(body, Manifest):
            return bytes(frame.payload)
    raise PeerRefused(f"peer {peer} has no manifest", code=ErrorCode.NOT_FOUND, peer=peer)


class PeerSource(Source):
    """A peer of the swarm that says it has weights."""

    def __init__(self, board: Switchboard, peer: PeerId) -> None:
        self.name = peer
        self._board = board

    def __repr__(self) -> str:
        return f"<PeerSource {self.name}>"

    async def hashes(self, file: FileContent) -> Buffer:
        async for frame, body in ask(self._board, self.name, GetChunks(file.root, 0, 0)):
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
    """The hub that the manifest names: files come whole, into the hub's own cache, at the revision that was founded on."""

    def __init__(self, model: ModelInfo, chunk_bytes: int) -> None:
        assert model.hub_id is not None
        self.name = model.hub_id
        self._revision = model.revision
        self._chunk_bytes = chunk_bytes

    def __repr__(self) -> str:
        return f"<HubSource {self.name}>"

    async def _fetch(self, file: FileContent) -> Path:
        return await asyncio.to_thread(self._download, file)

    def _download(self, file: FileContent) -> Path:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError

        try:
            return Path(hf_hub_download(self.name, file.name, revision=self._revision))
        except (HfHubHTTPError, OSError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise CheckpointError(f"the hub does not give {file.name} of {self.name}: {reason}") from error

    async def hashes(self, file: FileContent) -> Buffer:
        return await asyncio.to_thread(chunk_hashes, await self._fetch(file), self._chunk_bytes)

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        path = await self._fetch(file)
        for number in range(first, first + count):
            yield number, await asyncio.to_thread(_read, path, number * self._chunk_bytes, self._chunk_bytes)


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(offset)
        return stream.read(size)
