"""Manifests that this machine has seen: a swarm's id is the hash of its manifest, so what was fetched once holds for ever.

HOME/manifests/<id>.manifest   the bytes as the founder wrote them
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.swarm.records.manifest import MAX_MANIFEST_BYTES, swarm_id
from swarmnode.swarm.storage.atomic import write_private

log = logging.getLogger(__name__)

FOLDER = "manifests"
SUFFIX = ".manifest"


class ManifestCache:
    """Those under one home folder. It is only a help: a missing or damaged one is fetched again."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def __repr__(self) -> str:
        return f"<ManifestCache {self._folder}>"

    def get(self, swarm: bytes) -> bytes | None:
        """The manifest of the swarm with this id; None where it is not here, or is not what it was."""
        with contextlib.suppress(OSError):
            path = self._path(swarm)
            if path.stat().st_size <= MAX_MANIFEST_BYTES:
                raw = path.read_bytes()
                return raw if swarm_id(raw) == swarm else None
        return None

    def keep(self, raw: bytes) -> None:
        """Keep a manifest, if that can be."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_private(self._path(swarm_id(raw)), raw)
        except (OSError, LocalError) as error:
            log.info("the manifest is fetched again next time: %s", error)

    def _path(self, swarm: bytes) -> Path:
        return self._folder / f"{swarm.hex()}{SUFFIX}"
