"""The owner's key at the command line, and the password that opens the key.

Sources:

SWARMNODE_OWNER_KEY        the key itself, as PEM text: for an agent or a secret store that hands it out
--password-file FILE       its first line is the password
SWARMNODE_OWNER_PASSWORD   the password
otherwise                  a question at the terminal for a locked key; a new key is locked only if a password is given
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from swarmnode.files import read_bounded
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.storage.owner_files import OWNER_SUFFIX, is_locked, load_owner_key, parse_owner_key
from swarmnode.terminal.console import ask, fail, is_piped
from swarmnode.terminal.option import option, path_option

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
        return load_owner_key(path, known_password(self.password_file) or _ask(f"Password of {path}", again=False))

    def key_at_hand(self, swarm_file: Path) -> SigningKey | None:
        """Return the owner's key if it opens without a question; None if it does not, or is not here. Raises UsageError if the
        given password is wrong."""
        path = self._path(swarm_file)
        if not self.has_key(swarm_file):
            return None
        if path is None or not is_locked(path):
            return self._open(path)
        password = known_password(self.password_file)
        return load_owner_key(path, password) if password else None

    def has_key(self, swarm_file: Path) -> bool:
        """Return whether there is a key, in the environment or a file."""
        path = self._path(swarm_file)
        return path is None or path.exists()

    @property
    def is_given(self) -> bool:
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
        known = known_password(self.password_file)
        return known or (_ask("A password for the owner's key", again=True) if self.ask_password else "")


def known_password(password_file: Path | None) -> str:
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
