"""Manifests that this machine has seen: a swarm's id is the hash of its manifest, so what was fetched once holds for ever.

HOME/manifests/<id>.manifest   the bytes as the founder wrote them
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from swarmnode.errors import LocalError
from swarmnode.files.bounded import read_bounded
from swarmnode.files.durable import write_private
from swarmnode.swarm.records.manifest import MAX_MANIFEST_BYTES, swarm_id

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
            raw = read_bounded(self._path(swarm), MAX_MANIFEST_BYTES)
            return raw if raw is not None and swarm_id(raw) == swarm else None
        return None

    def keep(self, raw: bytes) -> None:
        """Keep a manifest, if that can be."""
        try:
            write_private(self._path(swarm_id(raw)), raw, make_folder=True)
        except LocalError as error:
            log.info("the manifest is fetched again next time: %s", error)

    def _path(self, swarm: bytes) -> Path:
        return self._folder / f"{swarm.hex()}{SUFFIX}"
