"""What this machine itself keeps for others, as a source like any peer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from swarmnode.errors import CheckpointError
from swarmnode.net.interfaces import Buffer
from swarmnode.roles.fetching.sources import Source
from swarmnode.swarm.storage.backups import BackupFolder
from swarmnode.swarm.storage.content import CHUNK_BYTES, FileContent, matching_hashes

NAME = "this machine"


class LocalSource(Source):
    """Gives what its folder of backups has."""

    def __init__(self, backups: BackupFolder) -> None:
        self.name = NAME
        self._backups = backups

    def __repr__(self) -> str:
        return f"<LocalSource of {self._backups!r}>"

    async def hashes(self, file: FileContent) -> Buffer:
        path = self._path(file)
        try:
            hashes = await asyncio.to_thread(matching_hashes, path, file)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        if hashes is None:
            raise CheckpointError(f"{path} was changed or damaged")
        return hashes

    async def chunks(self, file: FileContent, first: int, count: int) -> AsyncIterator[tuple[int, Buffer]]:
        path = self._path(file)
        try:
            for number in range(first, first + count):
                yield number, await asyncio.to_thread(_read, path, number)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error

    def _path(self, file: FileContent) -> Path:
        found = self._backups.find(file.root)
        if found is None:
            raise CheckpointError(f"{file.name} is not among the backups here")
        return found[-1]


def _read(path: Path, number: int) -> bytes:
    with path.open("rb") as stream:
        stream.seek(number * CHUNK_BYTES)
        return stream.read(CHUNK_BYTES)
