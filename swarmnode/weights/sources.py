"""Sources of a checkpoint's chunks: model files on this machine's own disk, other peers, or the hub that the manifest names."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import logging
import os
import re
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from swarmnode.codec.messages import Chunk, GetChunks
from swarmnode.errors import ProtocolError
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import Buffer, PeerId
from swarmnode.peer.questions import ask, ask_one
from swarmnode.swarm.records import manifest as manifests
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import (
    CHUNK_BYTES,
    GGUF_SUFFIX,
    HASH_BYTES,
    WEIGHTS_SUFFIX,
    FileContent,
    Progress,
    is_weights,
    verify_chunk,
    verify_hashes,
)

log = logging.getLogger(__name__)

HASHING_S = 120.0  # for a hash list, which the peer may first have to compute from a file of gigabytes
MAX_LISTED = 50_000  # entries of a folder and the folders in it
COMPARED_CHUNKS = 8  # of a local file, before its other chunks are tried
COPIED_AT_ONCE = 16  # chunks, by one call in a thread
MAX_TOLD = 3  # faults in one message
_OLLAMA_BLOB = re.compile(r"sha256-[0-9a-f]{64}")


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


def model_caches() -> tuple[Path, ...]:
    """Return the model folders of Ollama, LM Studio, llama.cpp and the Hugging Face hub, whether or not they exist."""
    home, named = Path.home(), os.environ.get
    caches = Path(named("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(named("HF_HOME") or caches / "huggingface") / "hub"
    folders = (
        Path(named("OLLAMA_MODELS") or home / ".ollama/models") / "blobs",
        Path("/usr/share/ollama/.ollama/models/blobs"),  # of Ollama's service on Linux
        home / ".lmstudio/models",
        caches / "lm-studio/models",
        Path(named("LLAMA_CACHE") or caches / "llama.cpp"),
        home / "Library/Caches/llama.cpp",
        Path(named("HF_HUB_CACHE") or hub),
    )
    return tuple(Path(os.path.realpath(folder)) for folder in folders)


class LocalFile:
    """Regular file on this machine's disk that may be a `file` of the swarm, as a whole or in part.

    It belongs to another program, which may change it at any time. So it is neither mapped nor linked: each chunk is read into
    memory, verified there, and written.
    """

    def __init__(self, path: Path, file: FileContent) -> None:
        self._path = path
        self._file = file
        self._is_alike = False  # some chunk was right
        self._differs = False  # as a whole
        self.fault = ""  # reason why the file is not read any more

    def hashes(self, cache: ChunkFolder) -> bytes | None:
        """Hash the whole file. Returns the list of its chunk hashes, which the cache keeps, or None if it is another file.

        Raises LocalError if the disk is full.
        """
        if self._differs or self.fault:
            return None
        found = b""
        with self._telling_faults(), self._opened() as descriptor:
            if os.fstat(descriptor).st_size == self._file.size:
                pieces = (self._read(descriptor, number) for number in range(self._file.chunks()))
                found = b"".join(hashlib.sha256(piece).digest() for piece in pieces)
        self._differs = not verify_hashes(self._file, found)
        if self._differs:
            return None
        cache.store_hashes(self._file, found)
        return found

    def copy(self, numbers: Sequence[int], hashes: bytes, cache: ChunkFolder) -> int:
        """Copy those of the chunks `numbers` that are right, and return their bytes. A file without any right chunk is not read
        any further.

        Raises LocalError if the disk is full.
        """
        file, copied_bytes = self._file, 0
        with self._telling_faults(), self._opened() as descriptor:
            compared = range(0, file.chunks(), -(-file.chunks() // COMPARED_CHUNKS))
            right = (verify_chunk(hashes, number, self._read(descriptor, number)) for number in compared)
            self._is_alike = self._is_alike or any(right)
            if not self._is_alike:
                self.fault = f"{self._path} is another file than this swarm's {file.name}"
            for number in numbers if self._is_alike else ():
                data = self._read(descriptor, number)
                if verify_chunk(hashes, number, data):
                    cache.write(file, number, data)
                    copied_bytes += len(data)
        return copied_bytes

    @contextmanager
    def _telling_faults(self) -> Iterator[None]:
        """Turn an OSError within the block into the file's fault."""
        try:
            yield
        except OSError as error:
            self.fault = f"{self._path} cannot be read ({error.strerror or error})"

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file within the block. Raises OSError if it cannot be opened, or is no regular file any more."""
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, number: int) -> bytearray:
        """Return the bytes at a chunk's place; fewer if the file ends there. Raises OSError."""
        data, size, begin = bytearray(), self._file.chunk_size(number), number * CHUNK_BYTES
        while len(data) < size and (piece := os.pread(descriptor, size - len(data), begin + len(data))):
            data += piece
        return data


class LocalFiles:
    """Model files on this machine's disk, at the `places` that its owner named. Chunks of the swarm's `files` are copied from them
    into the node's cache; nothing else of them is used."""

    def __init__(self, places: Sequence[Path], files: Iterable[FileContent]) -> None:
        self._places = places
        self._files = [file for file in files if is_weights(file.name)]
        self._logged: set[str] = set()
        self.copied_bytes = 0

    async def copy(
        self,
        wanted: Mapping[FileContent, Iterable[int]],
        cache: ChunkFolder,
        hashes: Callable[[FileContent], Awaitable[bytes | None]],
        progress: Progress | None = None,
    ) -> None:
        """Copy those of the `wanted` chunks that are on this disk and not in the `cache`.

        Args:
            wanted: the numbers of the chunks, by file.
            cache: the folder to copy into.
            hashes: returns a file's verified list of chunk hashes; None if no peer has it. The whole local file is hashed then.
            progress: is called with the copied bytes and those of all wanted chunks.

        Raises:
            LocalError: if the disk is full.
        """
        missing = await asyncio.to_thread(self._missing, wanted, cache)
        if not missing:
            return
        done_bytes, total_bytes = 0, sum(file.chunk_size(number) for file in missing for number in missing[file])
        await asyncio.to_thread(cache.make_room, total_bytes)
        for file, numbers in missing.items():
            chunk_hashes = await hashes(file)
            for local in self._candidates[file.root]:
                chunk_hashes = chunk_hashes or await asyncio.to_thread(local.hashes, cache)
                for first in range(0, len(numbers), COPIED_AT_ONCE):
                    if chunk_hashes is None or local.fault:
                        break
                    some = numbers[first : first + COPIED_AT_ONCE]
                    copied_bytes = await asyncio.to_thread(local.copy, some, chunk_hashes, cache)
                    self.copied_bytes += copied_bytes
                    done_bytes += copied_bytes
                    if progress is not None:
                        progress(done_bytes, total_bytes)
                numbers = await asyncio.to_thread(cache.missing, file, numbers)
            if numbers and chunk_hashes is not None:
                self._tell_lacking(file, numbers)

    def _tell_lacking(self, file: FileContent, numbers: Sequence[int]) -> None:
        """Log once why local files do not have all chunks."""
        faults = [local.fault for local in self._candidates[file.root] if local.fault]
        lacking = f"{len(numbers)} chunks of this swarm's {file.name} are not on this disk"
        told = "; ".join(faults[:MAX_TOLD]) or lacking
        if told not in self._logged:
            self._logged.add(told)
            log.warning("%s; your node asks the peers", told)

    def _missing(self, wanted: Mapping[FileContent, Iterable[int]], cache: ChunkFolder) -> dict[FileContent, list[int]]:
        """Return the wanted chunks that the cache lacks, of the files that have a candidate."""
        files = [file for file in wanted if is_weights(file.name) and file.root in self._candidates]
        return {file: numbers for file in files if (numbers := cache.missing(file, wanted[file]))}

    @functools.cached_property
    def _candidates(self) -> dict[bytes, list[LocalFile]]:
        """The local files that may be a file of the swarm, by its root."""
        found: dict[bytes, list[LocalFile]] = {}
        for place in self._places:
            for path in _model_files(place):
                for file in self._possible(path, place):
                    found.setdefault(file.root, []).append(LocalFile(path, file))
        if not found:
            places = self._places[0] if len(self._places) == 1 else "any place of --weights auto"
            log.warning("no file of this swarm's weights is at %s; your node asks the peers", places)
        return found

    def _possible(self, path: Path, place: Path) -> list[FileContent]:
        """Return the files of the swarm that a local file at `place` may be: those of its size. If there is none, also that of its
        name if it is directly in a named folder, and all of its kind if the owner named it itself."""
        size = _regular_size(path)
        alike = [file for file in self._files if file.size == size]
        if alike or size is None:
            return alike
        if path != place:
            return [file for file in self._files if path.parent == place and file.name == path.name]
        kind = WEIGHTS_SUFFIX if path.suffix == WEIGHTS_SUFFIX else GGUF_SUFFIX
        return [file for file in self._files if file.name.endswith(kind)]


def _model_files(place: Path) -> Iterator[Path]:
    """Yield the file `place`, or the real paths of the model files in this folder and the folders in it, each once. A link counts
    only if its target is in the folder, or, for a snapshot of a hub model, in the folder of that model."""
    if _regular_size(place) is not None:
        yield place
        return
    is_snapshot = place.parent.name == "snapshots" and place.parents[1].name.startswith("models--")
    root = place.parents[1] if is_snapshot else place
    seen, listed, folders = set[Path](), 0, deque([place])
    while folders:
        with suppress(OSError), os.scandir(folders.popleft()) as entries:
            for entry in entries:
                listed += 1
                if listed > MAX_LISTED:
                    log.warning("%s has more than %d entries; your node looks at no further ones", place, MAX_LISTED)
                    return
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                elif is_weights(entry.name) or _OLLAMA_BLOB.fullmatch(entry.name):
                    path = Path(os.path.realpath(entry.path))
                    if path not in seen and path.is_relative_to(root):
                        seen.add(path)
                        yield path


def _regular_size(path: Path) -> int | None:
    """Return the size of a regular file; None if it is none, or cannot be looked at."""
    with suppress(OSError):
        found = path.stat()
        return found.st_size if stat.S_ISREG(found.st_mode) else None
    return None
