"""Founding a swarm, for `create` and `host`: its file and its owner's key are written at the very end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from swarmnode.cli.options.owner import KEY_VARIABLE, new_password, owner_key_of
from swarmnode.cli.terminal.bars import bytes_bar
from swarmnode.cli.terminal.console import fail
from swarmnode.files.permissions import may_write

if TYPE_CHECKING:
    from swarmnode.roles.creation.bootstraps import Bootstraps
    from swarmnode.roles.creation.model_source import ModelSource
    from swarmnode.swarm.records.signing_key import SigningKey
    from swarmnode.swarm.storage.swarmfile import Swarm

SUFFIX = ".swarm"
ANNOUNCE = typer.Option(
    [], "--announce", metavar="MADDR", help="Address under which others reach it, where that differs from --listen."
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
    from swarmnode.roles.creation.swarm_creation import check_name

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


@contextmanager
def new_weights(path: Path) -> Iterator[Path]:
    """The folder beside the .swarm file for weights that did not exist yet; it does not stay where founding the swarm fails."""
    folder = path.with_name(f"{path.stem}-weights").absolute()
    was_there = folder.exists()
    try:
        yield folder
    except BaseException:
        if not was_there:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def new_owner(path: Path, given: Path | None, password_file: Path | None, *, force: bool = False) -> NewOwner:
    """The owner's key: the one that is given, or a new one beside the .swarm file."""
    from swarmnode.swarm.records.signing_key import SigningKey
    from swarmnode.swarm.storage.owner_key import SUFFIX as OWNER_SUFFIX

    if given is not None or os.environ.get(KEY_VARIABLE):
        return NewOwner(owner_key_of(path, given, password_file))
    file = path.with_suffix(OWNER_SUFFIX)
    if file.exists() and not force:
        fail(f"{file} exists already; to found another swarm with this key, give --owner-key {file}", 2)
    return NewOwner(SigningKey.generate(), file, new_password(password_file))


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
) -> Swarm:
    """A new swarm of this model, kept in its file. Raises UsageError, CheckpointError, LocalError."""
    from msgspec import UNSET

    from swarmnode.roles.creation.swarm_creation import create_swarm
    from swarmnode.swarm.records.manifest import CREDIT, OPEN, PRIVATE

    with bytes_bar("Hashing the weights", quiet=quiet) as progress:
        swarm = create_swarm(
            path.stem,
            source,
            bootstraps,
            mode=mode,
            membership=PRIVATE if private else OPEN,
            owner=owner.key if owner else None,
            priority=CREDIT if by_credit else UNSET,
            progress=progress,
        )
    return _keep(swarm, owner, path)


def _keep(swarm: Swarm, owner: NewOwner | None, path: Path) -> Swarm:
    """Write the new swarm, its owner's key, and of a private one the grant for the host's own machines. Raises LocalError."""
    from swarmnode.roles.membership.owner import with_host_grant
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
