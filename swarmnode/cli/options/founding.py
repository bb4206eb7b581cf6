"""Options of a new swarm, and the owner's key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import UsageError
from swarmnode.files import read_bounded
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.storage.owner_files import OWNER_SUFFIX, is_locked, load_owner_key, parse_owner_key
from swarmnode.terminal.console import ask, fail, is_piped
from swarmnode.terminal.option import option, path_option

if TYPE_CHECKING:
    from swarmnode.founding.swarm_creation import NewOwner


KEY_VARIABLE = "SWARMNODE_OWNER_KEY"
PASSWORD_VARIABLE = "SWARMNODE_OWNER_PASSWORD"
MAX_PASSWORD_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class OwnerOptions:
    """Options of the owner's key and its password."""

    owner_key: Path | None = path_option("Owner's key; default: NAME.owner beside NAME.swarm.")
    password_file: Path | None = path_option("File whose first line is the owner's password.")

    def key_of(self, swarm_file: Path) -> SigningKey:
        """Return the owner's key, unlocked; end the command if its file is missing. Raises UsageError if the password is wrong."""
        path = self._path(swarm_file)
        if path is None or not is_locked(path):
            return self._open(path)
        return load_owner_key(path, read_password(self.password_file) or _ask(f"Password of {path}", again=False))

    def key_at_hand(self, swarm_file: Path) -> SigningKey | None:
        """Return the owner's key if it opens without a question; None if it does not, or is not here. Raises UsageError if the
        given password is wrong."""
        path = self._path(swarm_file)
        if not self.has_key(swarm_file):
            return None
        if path is None or not is_locked(path):
            return self._open(path)
        password = read_password(self.password_file)
        return load_owner_key(path, password) if password else None

    def has_key(self, swarm_file: Path) -> bool:
        """Return whether there is a key, in the environment or a file."""
        path = self._path(swarm_file)
        return path is None or path.exists()

    @property
    def is_set(self) -> bool:
        """Whether the user has given a key, as a file or in the environment."""
        return self.owner_key is not None or bool(os.environ.get(KEY_VARIABLE))

    def _path(self, swarm_file: Path) -> Path | None:
        """Return the path of the owner's key; None if the environment has the key itself."""
        return None if os.environ.get(KEY_VARIABLE) else self.owner_key or swarm_file.with_suffix(OWNER_SUFFIX)

    def _open(self, path: Path | None) -> SigningKey:
        """Return the key in an unlocked file, or in the environment if `path` is None; end the command if the file is missing."""
        if path is None:
            return parse_owner_key(os.environ[KEY_VARIABLE].encode(), None, source=KEY_VARIABLE)
        if not path.exists():
            fail(f"{path}: no such file; only the owner can do this: give the key with --owner-key", 2)
        return load_owner_key(path, None)


@dataclass(frozen=True)
class NewOwnerOptions(OwnerOptions):
    """Options of a new swarm's owner."""

    ask_password: bool = option(False, "Ask for a password for the new owner's key, which otherwise has none.")

    def new_password(self) -> str:
        """Return the password for a new key; empty if neither a file nor the environment has one and the user is not asked."""
        known = read_password(self.password_file)
        return known or (_ask("A password for the owner's key", again=True) if self.ask_password else "")


def read_password(password_file: Path | None) -> str:
    """Return the password from the file or the environment; empty if there is none. Ends the command if the file cannot be read."""
    if password_file is None:
        return os.environ.get(PASSWORD_VARIABLE, "")
    try:
        lines = (read_bounded(password_file, MAX_PASSWORD_FILE_BYTES) or b"").decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {password_file}: {getattr(error, 'strerror', None) or error}", 2)
    if not lines or not lines[0]:
        fail(f"{password_file} has no password: write it into the first line", 2)
    return lines[0]


def _ask(question: str, *, again: bool) -> str:
    if is_piped():
        fail(f"there is no terminal to ask for the password: give --password-file or set {PASSWORD_VARIABLE}", 2)
    password: str = ask(question, hide_input=True, confirmation_prompt=again)
    return password


listen_option = partial(option, [], metavar="MADDR")


@dataclass(frozen=True)
class BootstrapOptions:
    """Options for the addresses of a new swarm's bootstrap peer."""

    listen: list[str] = listen_option("Where `swarmnode host --door-only` listens; default: a free loopback port.")
    announce: list[str] = option([], "Address at which others reach it, if not --listen's.", metavar="MADDR")


@dataclass(frozen=True)
class MembershipOptions:
    """Options of a new swarm's membership: private, unless another kind is chosen."""

    private: bool = option(False, "Admit only machines that you invite; this is the default.")
    public: bool = option(False, "Let everyone join, not only those that you invite; you can revoke machines.")
    unowned: bool = option(
        False, "Let everyone with the invite join, without an owner's key and revocations.", "--open"
    )

    @property
    def chosen(self) -> str:
        """The chosen flag, without dashes; empty if there is none. Raises UsageError if there are several."""
        flags = {"private": self.private, "public": self.public, "open": self.unowned}
        given = [flag for flag, on in flags.items() if on]
        if len(given) > 1:
            raise UsageError(f"give either --{' or --'.join(given)}, not both")
        return "".join(given)

    @property
    def membership(self) -> str:
        """The membership of a new swarm: "private", "public" or "open". Raises UsageError if several were chosen."""
        return self.chosen or "private"


def _adapters(texts: Sequence[str], flag: str) -> dict[str, Path]:
    """Return the adapters' folders by the adapters' names. Raises UsageError if a text is not NAME=DIR, a name is invalid or
    occurs twice, or there are too many."""
    if not texts:
        return {}  # without the imports
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


def owner_of(path: Path, owner: NewOwnerOptions, *, force: bool = False) -> NewOwner:
    """Return the owner's key: the given one, or a new one beside the .swarm file. Raises UsageError if that exists already."""
    from swarmnode.founding.swarm_creation import NewOwner, new_owner

    if owner.is_set:
        return NewOwner(owner.key_of(path))
    return new_owner(path, owner.new_password, force=force)
