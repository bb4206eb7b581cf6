"""Founding a swarm, for `create` and `host`: its file and its owner's key are written at the very end."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import option
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.cli.terminal.console import fail
from swarmnode.cli.terminal.progress import bytes_bar
from swarmnode.errors import UsageError
from swarmnode.files import may_write

if TYPE_CHECKING:
    from swarmnode.founding.bootstraps import Bootstraps
    from swarmnode.founding.model_source import ModelSource
    from swarmnode.net.identity import SigningKey
    from swarmnode.swarm.storage.swarmfile import Swarm

SUFFIX = ".swarm"
listen_option = partial(option, [], metavar="MADDR")


@dataclass(frozen=True)
class DoorOptions:
    """Addresses of a new swarm's bootstrap peer."""

    listen: list[str] = listen_option("Where `swarmnode bootstrap` will listen; default: a free port on loopback.")
    announce: list[str] = option(
        [], "Address under which others reach it, where that differs from --listen.", metavar="MADDR"
    )


@dataclass(frozen=True)
class NewOwner:
    """The owner's key; a new one has a `file` to be written, once everything else is known to be right."""

    key: SigningKey
    file: Path | None = None
    password: str = field(default="", repr=False)

    def save(self) -> None:
        """Write a new key under its password. Raises LocalError."""
        from swarmnode.swarm.storage.owner_key import save_owner_key

        if self.file is not None:
            save_owner_key(self.key, self.file, self.password)


def new_swarm_file(name: str, *, force: bool = False) -> Path:
    """The .swarm file to be written, where one can be written. Raises UsageError for what cannot be a swarm's name."""
    from swarmnode.founding.swarm_creation import check_name

    stem = Path(name).name.removesuffix(SUFFIX)
    check_name(stem)
    path = Path(name).with_name(stem + SUFFIX)
    folder = path.absolute().parent
    if not folder.is_dir():
        fail(f"{path.parent}: no such folder to write {path.name} into", 2)
    if path.is_dir():
        fail(f"{path} is a folder; choose another name", 2)
    if path.exists() and not force:
        fail(f"{path} exists already; choose another name, or --force to overwrite it", 2)
    if not may_write(folder):
        fail(f"{path.parent} cannot be written to: name a file in a folder of yours")
    return path


def _adapters(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Return folders by the names of the adapters in them. Raises UsageError."""
    from swarmnode.founding.swarm_creation import check_adapter_names

    for text in texts:
        if not all(text.partition("=")):
            raise UsageError(f"{flag} takes a name and a folder, as in verse=./verse-lora, not {text!r}")
    named = [(name, Path(folder).expanduser()) for name, _, folder in (text.partition("=") for text in texts)]
    check_adapter_names([name for name, _ in named])
    return dict(named)


ADAPTERS = option(
    [],
    "A LoRA adapter that who asks may choose by this name: a folder that peft has saved it into. Repeatable.",
    "--adapter",
    metavar="NAME=DIR",
    parse=_adapters,
)


@contextmanager
def new_beside(path: Path, what: str = "weights") -> Iterator[Path]:
    """The folder beside the .swarm file for what did not exist yet; it does not stay where founding the swarm fails."""
    folder = path.with_name(f"{path.stem}-{what}").absolute()
    was_there = folder.exists()
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def new_owner(path: Path, owner: OwnerOptions, *, force: bool = False) -> NewOwner:
    """Return the owner's key: the one that is given, or a new one beside the .swarm file."""
    from swarmnode.net.identity import SigningKey
    from swarmnode.swarm.storage.owner_key import SUFFIX as OWNER_SUFFIX

    if owner.is_given:
        return NewOwner(owner.key_of(path))
    file = path.with_suffix(OWNER_SUFFIX)
    if file.exists() and not force:
        fail(f"{file} exists already; to found another swarm with this key, give --owner-key {file}", 2)
    return NewOwner(SigningKey.generate(), file, owner.new_password())


def found(
    path: Path,
    source: ModelSource,
    bootstraps: Bootstraps,
    owner: NewOwner | None,
    *,
    mode: str,
    private: bool,
    quiet: bool,
    by_credit: bool = False,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    force: bool = False,
) -> Swarm:
    """A new swarm of this model, with `adapters` from folders by their names, kept in its file. Raises UsageError, CheckpointError,
    LocalError."""
    from msgspec import UNSET

    from swarmnode.founding.swarm_creation import create_swarm, from_folders
    from swarmnode.swarm.records.manifest import CREDIT, OPEN, PRIVATE

    with new_beside(path, "adapters") as folder, bytes_bar("Hashing the weights", quiet=quiet) as progress:
        adapter_source = from_folders(adapters, source, folder, force=force) if adapters else None
        swarm = create_swarm(
            path.stem,
            source,
            bootstraps,
            mode=mode,
            membership=PRIVATE if private else OPEN,
            owner=owner.key if owner else None,
            priority=CREDIT if by_credit else UNSET,
            adapters=adapter_source,
            progress=progress,
        )
        return _keep(swarm, owner, path)


def _keep(swarm: Swarm, owner: NewOwner | None, path: Path) -> Swarm:
    """Write the new swarm, its owner's key, and of a private one the grant for the host's own machines. Raises LocalError."""
    from swarmnode.membership.owner import with_host_grant
    from swarmnode.swarm.storage.issued_invites import IssuedInvites, issued_invites_path
    from swarmnode.swarm.storage.swarmfile import save_swarm

    if owner is not None:
        owner.save()
    if owner is not None and swarm.private:
        book = IssuedInvites(issued_invites_path(path))
        swarm = with_host_grant(swarm, owner.key, book)
        book.save()
    save_swarm(swarm, path)
    return replace(swarm, file=path)
