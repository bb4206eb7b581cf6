"""Where a node's weights come from: the founder's own folder where it is at hand, else the other peers."""

from __future__ import annotations

import asyncio
import logging

from swarmnode.compute.checkpoint import Checkpoint
from swarmnode.errors import CheckpointError
from swarmnode.plan.view import Span
from swarmnode.swarm.content import verify_file
from swarmnode.swarm.manifest import Manifest
from swarmnode.presence import Presence

log = logging.getLogger(__name__)


class Weights:
    """The checkpoint of a swarm as far as it is on this machine."""

    def __init__(self, presence: Presence) -> None:
        swarm = presence.swarm
        assert swarm.manifest is not None
        self._manifest: Manifest = swarm.manifest
        self._hint = swarm.checkpoint

    async def outline(self) -> Checkpoint:
        """Config and headers, enough to know every tensor's place and size."""
        assert self._hint is not None
        return Checkpoint(self._hint)

    async def small_files(self) -> Path:
        assert self._hint is not None
        return self._hint

    async def ends(self) -> Checkpoint:
        return await self.outline()

    async def span(self, units: Span) -> Checkpoint:
        """The checkpoint with the tensors of these units present and verified."""
        checkpoint = await self.outline()
        files = {checkpoint.entries[name].file for name in checkpoint.tensors_of(units.start, units.end)}
        for path in sorted(files):
            content = self._manifest.file(path.name)
            if content is None or not await asyncio.to_thread(verify_file, path, content):
                raise CheckpointError(
                    f"{path} is not the file that the swarm was founded on: it was changed or damaged"
                )
        return checkpoint
