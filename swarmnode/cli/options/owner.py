"""The owner's key at the command line: where it comes from, and who is asked for its password.

SWARMNODE_OWNER_KEY        the key itself, as PEM text: for an agent or a secret store that hands it out
--password-file FILE       its first line is the password
SWARMNODE_OWNER_PASSWORD   the password
otherwise                  a question at the terminal
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import typer

from swarmnode.cli.options.option import path_option
from swarmnode.cli.terminal.console import fail
from swarmnode.cli.terminal.standard_input import is_piped
from swarmnode.files import read_bounded
from swarmnode.net.identity import SigningKey
from swarmnode.swarm.storage.owner_key import SUFFIX, load_owner_key, parse_owner_key

KEY_VARIABLE = "SWARMNODE_OWNER_KEY"
PASSWORD_VARIABLE = "SWARMNODE_OWNER_PASSWORD"
MAX_PASSWORD_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class OwnerOptions:
    """Options of the owner's key and its password."""

    owner_key: Path | None = path_option("The owner's key; default: NAME.owner beside NAME.swarm.")
    password_file: Path | None = path_option("The owner's password is its first line.")

    def key_of(self, swarm_file: Path) -> SigningKey:
        """Return the key to a swarm, unlocked. Raises UsageError if the file is missing or the password is wrong."""
        if pem := os.environ.get(KEY_VARIABLE):
            return parse_owner_key(pem.encode(), None, source=KEY_VARIABLE)
        path = self.owner_key or swarm_file.with_suffix(SUFFIX)
        if not path.exists():
            fail(f"{path}: no such file; only the owner, who has the key, can do this", 2)
        return load_owner_key(path, known_password(self.password_file) or _ask(f"Password of {path}", again=False))

    @property
    def is_given(self) -> bool:
        """Whether there is a key already, from a file or the environment."""
        return self.owner_key is not None or bool(os.environ.get(KEY_VARIABLE))

    def new_password(self) -> str:
        """Return the password for a new key."""
        return known_password(self.password_file) or _ask("A password for the owner's key", again=True)


def known_password(password_file: Path | None) -> str:
    """The password that needs no question; empty where there is none."""
    if password_file is None:
        return os.environ.get(PASSWORD_VARIABLE, "")
    try:
        lines = (read_bounded(password_file, MAX_PASSWORD_FILE_BYTES) or b"").decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read {password_file}: {getattr(error, 'strerror', None) or error}", 2)
    if not lines or not lines[0]:
        fail(f"{password_file} has no password in its first line", 2)
    return lines[0]


def _ask(question: str, *, again: bool) -> str:
    if is_piped():
        fail(f"no terminal to ask for a password at: give --password-file or set {PASSWORD_VARIABLE}", 2)
    password: str = typer.prompt(question, hide_input=True, confirmation_prompt=again, err=True)
    return password
