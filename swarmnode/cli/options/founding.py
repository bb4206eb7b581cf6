"""Founding of a swarm for `create` and `host`. The swarm's file and its owner's key are written last, after everything else has
succeeded."""

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

    listen: list[str] = listen_option("Where `swarmnode bootstrap` listens; default: a free loopback port.")
    announce: list[str] = option([], "Address at which others reach it, if not --listen's.", metavar="MADDR")


@dataclass(frozen=True)
class NewOwner:
    """Owner's key of a swarm. A new key has a `file`, which `save` writes after everything else has been checked; an existing key
    has None."""

    key: SigningKey
    file: Path | None = None
    password: str = field(default="", repr=False)

    def save(self) -> None:
        """Write a new key, encrypted with its password; do nothing for an existing key. Raises LocalError."""
        from swarmnode.swarm.storage.owner_key import save_owner_key

        if self.file is not None:
            save_owner_key(self.key, self.file, self.password)


def new_swarm_file(name: str, *, force: bool = False) -> Path:
    """Return the path of a new .swarm file after checking that it can be written; end the command if it cannot. Raises UsageError
    if `name` is no possible name of a swarm."""
    from swarmnode.founding.swarm_creation import check_name

    stem = Path(name).name.removesuffix(SUFFIX)
    check_name(stem)
    path = Path(name).with_name(stem + SUFFIX)
    folder = path.absolute().parent
    if not folder.is_dir():
        fail(f"{path.parent}: no such folder for {path.name}; create it first", 2)
    if path.is_dir():
        fail(f"{path} is a folder; choose another name", 2)
    if path.exists() and not force:
        fail(f"{path} already exists; choose another name, or overwrite it with --force", 2)
    if not may_write(folder):
        fail(f"{path.parent} cannot be written to; choose a folder of yours")
    return path


def _adapters(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Return the adapters' folders by the adapters' names. Raises UsageError if a text is not NAME=DIR, or a name is not
    possible."""
    from swarmnode.founding.swarm_creation import check_adapter_names

    for text in texts:
        if not all(text.partition("=")):
            raise UsageError(f"{flag} takes a name and a folder, as in verse=./verse-lora, not {text!r}")
    named = [(name, Path(folder).expanduser()) for name, _, folder in (text.partition("=") for text in texts)]
    check_adapter_names([name for name, _ in named])
    return dict(named)


ADAPTERS = option(
    [],
    "A LoRA adapter that requests can choose by NAME; DIR is a folder saved by peft. Repeatable.",
    "--adapter",
    metavar="NAME=DIR",
    parse=_adapters,
)


@contextmanager
def new_beside(path: Path, what: str = "weights") -> Iterator[Path]:
    """Yield the folder NAME-`what` beside the .swarm file `path`, for data that founding creates. If founding fails, remove the
    folder unless it existed before."""
    folder = path.with_name(f"{path.stem}-{what}").absolute()
    was_there = folder.exists()
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def new_owner(path: Path, owner: OwnerOptions, *, force: bool = False) -> NewOwner:
    """Return the owner's key that `owner` names, or else a new one, to be saved beside the .swarm file; end the command if a key is
    there already and `force` is not given."""
    from swarmnode.net.identity import SigningKey
    from swarmnode.swarm.storage.owner_key import SUFFIX as OWNER_SUFFIX

    if owner.is_given:
        return NewOwner(owner.key_of(path))
    file = path.with_suffix(OWNER_SUFFIX)
    if file.exists() and not force:
        fail(f"{file} already exists; to use this key for the new swarm, give --owner-key {file}", 2)
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
    """Found a swarm of the model `source`, write its file at `path` and the owner's key, and return the swarm. `adapters` are
    folders by the adapters' names. Raises UsageError, CheckpointError, LocalError."""
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
    """Write the swarm's file and its owner's key; for a private swarm also the grant for the host's own machines. Raises
    LocalError."""
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
