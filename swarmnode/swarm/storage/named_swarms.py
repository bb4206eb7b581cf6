"""Swarms by name: joined swarms, public swarms, and the swarm used last.

- `HOME/swarms/friends.invite`: the invite, readable by its owner alone.
- `HOME/swarms/last`: the last used name, or path of a .swarm file.
- `HOME/swarms.json`: public swarms, in addition to those of the package.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from swarmnode.errors import UsageError
from swarmnode.files import write_private
from swarmnode.swarm.records.invite import decode_invite
from swarmnode.swarm.storage.user_file import VersionedFile, parse_versioned, read_user_file

FOLDER = "swarms"
SUFFIX = ".invite"
LAST = "last"
MAX_FILE_BYTES = 1 << 16
FORMAT = 1  # of a list of public swarms
FILE = "public_swarms.json"
USER_FILE = "swarms.json"
MAX_LIST_BYTES = 1 << 20
WHAT = "a list of swarms"


class PublicSwarm(msgspec.Struct, frozen=True):
    """Entry in a list of public swarms: the name, the invite and a description."""

    name: str
    invite: str
    about: str = ""


class _List(VersionedFile):
    swarms: tuple[PublicSwarm, ...] = ()


def known_swarms(home: Path | None) -> dict[str, PublicSwarm]:
    """Return the public swarms by name. The user's own list takes precedence over the package's.

    Raises UsageError if a list cannot be read or has a damaged invite.
    """
    shipped = resources.files("swarmnode.swarm.storage").joinpath(FILE).read_bytes()
    lists = [_parse(shipped, FILE)]
    if home is not None:
        path = home / USER_FILE
        own = read_user_file(path, max_bytes=MAX_LIST_BYTES, what=WHAT)
        if own is not None:
            lists.append(_parse(own, str(path)))
    return {swarm.name: swarm for swarms in lists for swarm in swarms}


def _parse(data: bytes, source: str) -> tuple[PublicSwarm, ...]:
    content = parse_versioned(data, _List, source=source, what=WHAT, newest=FORMAT)
    for swarm in content.swarms:
        decode_invite(swarm.invite)
    return content.swarms


class JoinedSwarms:
    """Invites of the swarms that this machine has joined, by name, in files under one home folder."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def __repr__(self) -> str:
        return f"<JoinedSwarms {', '.join(self.names())}>"

    def names(self) -> list[str]:
        """Return the names of all joined swarms, sorted."""
        return sorted(path.stem for path in self._folder.glob(f"*{SUFFIX}"))

    def invite_to(self, name: str) -> str | None:
        """Return the invite remembered under this name; None if there is none. Raises UsageError if it cannot be read."""
        return self._read(f"{name}{SUFFIX}") if _is_plain(name) else None

    def remember(self, invite: str, name: str = "") -> str:
        """Keep an invite under `name`, by default its swarm's name, and return that name.

        A newer invite to the same swarm replaces the old one. Raises UsageError if the invite is damaged or the name is
        not possible or another swarm's, LocalError if the file cannot be written.
        """
        invited = decode_invite(invite)
        name = name or invited.name
        if not _is_plain(name):
            raise UsageError(f"{name!r} cannot be the name of a file; choose another one with --name")
        known = self.invite_to(name)
        if known is not None and decode_invite(known).swarm_id != invited.swarm_id:
            raise UsageError(f"{name} is another swarm that you joined; choose another name with --name")
        write_private(self._folder / f"{name}{SUFFIX}", f"{invite}\n".encode(), make_folder=True)
        return name

    @property
    def last(self) -> str | None:
        """Name or path that was used last; None if there is none. Raises UsageError if the file cannot be read."""
        return self._read(LAST)

    def used(self, name: str) -> None:
        """Remember the name or path that was used last. Raises LocalError if the file cannot be written."""
        if name != self.last:
            write_private(self._folder / LAST, f"{name}\n".encode(), make_folder=True)

    def _read(self, file: str) -> str | None:
        data = read_user_file(self._folder / file, max_bytes=MAX_FILE_BYTES, what="the name of a swarm, or an invite")
        return None if data is None else data.decode(errors="replace").strip()


def _is_plain(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".") and name.isprintable()
