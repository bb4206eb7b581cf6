"""Adapters in a home folder: those that its owner brings into swarms, and the ids of those that its nodes must not serve."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from swarmnode.errors import LocalError, UsageError, with_advice
from swarmnode.swarm.records.adapter_record import DAY_S, SLOTS, AdapterRecord, Share
from swarmnode.swarm.storage.content import FileContent, describe_files
from swarmnode.swarm.storage.small_files import new_folder, read_kept, write_kept
from swarmnode.swarm.storage.weight_cache import folder_name

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"  # peft's own names
ABOUT_NAME = "about.json"
FOLDER = "adapters"  # in the home folder
BLOCKED_NAME = "blocked.json"
MAX_BLOCKED = 4096
MAX_KEPT_BYTES = 1 << 20
RECORD_S = DAY_S  # life of one signed record; peers drop the files at its end


class AdapterTerms(msgspec.Struct, frozen=True):
    """Terms of an adapter, as its owner has set them: its name, the peers that may use it, and its end in unix seconds."""

    name: str
    share: Share
    expires_at: int
    rank: int  # the largest one in its files
    slot: int = 0


@dataclass(frozen=True)
class OwnAdapter:
    """An adapter of this home folder: its terms, its two files, and the folder, as peft saved it, with these files."""

    terms: AdapterTerms
    config: FileContent
    weights: FileContent
    folder: Path

    def record(self, swarm: bytes, owner: str, now: float) -> AdapterRecord:
        """Return a record that begins at unix time `now`, and ends after RECORD_S or with the adapter's terms. `owner` is the id of
        the key that will sign it."""
        terms = self.terms
        return AdapterRecord(
            swarm,
            owner,
            terms.name,
            terms.share,
            terms.rank,
            self.config.size,
            self.config.root,
            self.weights.size,
            self.weights.root,
            int(now),
            min(terms.expires_at, int(now) + RECORD_S),
            terms.slot,
        )

    @property
    def paths(self) -> Mapping[bytes, Path]:
        """The files' paths by their roots."""
        return {file.root: self.folder / file.name for file in (self.config, self.weights)}


def adapter_in_folder(folder: Path, terms: AdapterTerms) -> OwnAdapter:
    """Hash the files of an adapter in a folder that peft saved. Raises LocalError if they cannot be read."""
    try:
        config, weights = describe_files([folder / CONFIG_NAME, folder / WEIGHTS_NAME])
    except OSError as error:
        raise LocalError(f"cannot read the adapter in {folder}: {with_advice(error, 'save it again')}") from error
    return OwnAdapter(terms, config, weights, folder)


class OwnAdapters:
    """The adapters that the owner of a home folder has added for one swarm."""

    def __init__(self, home: Path, swarm: bytes) -> None:
        self._folder = home / FOLDER / folder_name(swarm)
        self._hashed: dict[Path, OwnAdapter] = {}

    def __repr__(self) -> str:
        return f"<OwnAdapters in {self._folder}>"

    def all(self) -> list[OwnAdapter]:
        """Return the added adapters in the order of their names. A damaged one is left out. Files are hashed once."""
        found = []
        for folder in sorted(self._folder.glob("[!.]*/")):  # not those that are being written
            terms = read_kept(folder / ABOUT_NAME, AdapterTerms, max_bytes=MAX_KEPT_BYTES)
            if terms is None:
                continue
            known = self._hashed.get(folder)
            if known is None or known.terms != terms:
                try:
                    known = self._hashed[folder] = adapter_in_folder(folder, terms)
                except LocalError:
                    continue
            found.append(known)
        return found

    def add(self, source: Path, terms: AdapterTerms) -> OwnAdapter:
        """Copy an adapter from the folder `source`, and keep it under `terms.name`; a shared one gets a free slot.

        Raises UsageError if the name is taken or SLOTS adapters are shared already, LocalError if the disk cannot be written.
        """
        others = {one.terms.name.casefold(): one.terms for one in self.all()}
        if terms.name.casefold() in others:
            raise UsageError(
                f"you have added an adapter {terms.name!r} already; remove it first, or choose another --name"
            )
        if terms.share is not Share.PRIVATE:
            taken = {one.slot for one in others.values() if one.share is not Share.PRIVATE}
            free = next((slot for slot in range(SLOTS) if slot not in taken), None)
            if free is None:
                raise UsageError(f"you share {SLOTS} adapters already; remove one of them first")
            terms = msgspec.structs.replace(terms, slot=free)
        folder = self._folder / terms.name
        with new_folder(folder) as partial:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                shutil.copyfile(source / name, partial / name)
            write_kept(partial / ABOUT_NAME, terms)
        return adapter_in_folder(folder, terms)

    def remove(self, name: str) -> None:
        """Delete the adapter `name`. Raises UsageError if there is none, LocalError if it cannot be deleted."""
        if not any(one.terms.name == name for one in self.all()):
            raise UsageError(f"you have added no adapter {name!r}; `swarmnode adapter list` shows them")
        try:
            shutil.rmtree(self._folder / name)
        except OSError as error:
            raise LocalError(f"cannot delete {self._folder / name}: {error.strerror or error}") from error


class BlockedAdapters:
    """Ids of adapters that no node of this home folder serves. Running nodes read the file anew every few seconds."""

    def __init__(self, home: Path) -> None:
        self._path = home / FOLDER / BLOCKED_NAME

    def __repr__(self) -> str:
        return f"<BlockedAdapters in {self._path}>"

    def ids(self) -> frozenset[str]:
        """Return the blocked ids; empty if there is no list."""
        return frozenset(read_kept(self._path, list[str], max_bytes=MAX_KEPT_BYTES) or ())

    def block(self, adapter: str) -> None:
        """Add an id. Raises UsageError if the list is full, LocalError if it cannot be written."""
        ids = self.ids() | {adapter}
        if len(ids) > MAX_BLOCKED:
            raise UsageError(f"{MAX_BLOCKED} adapters are blocked already; unblock some, or run with --adapters none")
        write_kept(self._path, sorted(ids))

    def unblock(self, adapter: str) -> None:
        """Take an id off the list. Raises UsageError if it is not blocked, LocalError if the list cannot be written."""
        if adapter not in self.ids():
            raise UsageError(f"the adapter {adapter[:64]!r} is not blocked here")
        write_kept(self._path, sorted(self.ids() - {adapter}))
