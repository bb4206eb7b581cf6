"""A second voice for a state: whether other holders, whose files differ in their last bits, have the same values.

Replicas make the same updates, but devices round differently, so their files may have different roots. For who joins a few chunks,
drawn at random once the whole file is here, are asked of the others and compared: it shows a state that nobody trained, not one
that was changed in a few places. What is exported stays: of that every value is compared (`whole`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import numpy as np

from swarmnode.errors import CheckpointError, NetworkDown, PeerError
from swarmnode.net.interfaces import Buffer
from swarmnode.roles.fetching.sources import Source
from swarmnode.swarm.storage.chunk_folder import ChunkFolder
from swarmnode.swarm.storage.content import FileContent

SAMPLES = 4  # chunks
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # between devices: rounding, over many updates
STRAYS = 1e-3  # share of the values that may differ by more


class SecondVoice:
    """`mute`: names of those that did not give what they list."""

    def __init__(self, *, whole: bool = False) -> None:
        self.mute: set[str] = set()
        self._whole = whole
        self._rng = random.SystemRandom()

    def __repr__(self) -> str:
        return f"<SecondVoice, {len(self.mute)} peers mute>"

    async def confirmed(
        self, incoming: ChunkFolder, ours: FileContent, others: Iterable[tuple[Source, FileContent]], needed: int
    ) -> bool:
        """Whether so many of the others have values like those of `ours`, all of which are here."""
        for source, theirs in others:
            if needed and theirs.size == ours.size:
                needed -= await self._agrees(incoming, ours, source, theirs)
        return not needed

    async def _agrees(self, incoming: ChunkFolder, ours: FileContent, source: Source, theirs: FileContent) -> bool:
        chunks = ours.chunks()
        drawn = [(number, 1) for number in self._rng.sample(range(chunks), min(SAMPLES, chunks))]
        strays = 0.0 if self._whole else STRAYS
        try:
            for first, count in [(0, chunks)] if self._whole else drawn:
                async for number, chunk in source.chunks(theirs, first, count):
                    here = await asyncio.to_thread(incoming.read, ours, number)
                    if not are_alike(here, chunk, strays=strays):
                        return False
        except (PeerError, CheckpointError, NetworkDown):
            self.mute.add(source.name)
            return False
        return True


def are_alike(one: Buffer, other: Buffer, *, strays: float = STRAYS) -> bool:
    """Whether two pieces of equal files hold nearly the same float32 numbers, but for a share `strays` of them."""
    if len(one) != len(other):
        return False
    count = len(one) // 4
    left_N, right_N = (np.frombuffer(piece, dtype="<f4", count=count) for piece in (one, other))
    same_N = np.frombuffer(one, dtype="<u4", count=count) == np.frombuffer(other, dtype="<u4", count=count)
    with np.errstate(all="ignore"):
        close_N = np.abs(left_N - right_N) <= ABSOLUTE + RELATIVE * np.abs(right_N)
    return bool(np.count_nonzero(~(same_N | close_N)) <= strays * count)
