"""Swarms by name: joined swarms, swarms founded here, public swarms, and the swarm used last.

HOME/swarms/friends.invite   the invite, readable by its owner alone.
HOME/swarms/friends.swarm    link to the founder's own .swarm file.
HOME/swarms/last             the last used name, or path of a .swarm file
HOME/swarms.json             public swarms, in addition to those of the package
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import msgspec

from swarmnode.errors import UsageError
from swarmnode.files import make_private, write_private
from swarmnode.swarm.records.invite import decode_invite
from swarmnode.swarm.storage.small_files import VersionedFile, parse_user_file, parse_versioned, read_user_file

FOLDER = "swarms"
SUFFIX = ".invite"
LINK = ".swarm"  # the suffix of a founder's file
LAST = "last"
MAX_FILE_BYTES = 1 << 16
MAX_SWARM_FILE_BYTES = 4 << 20
FORMAT = 1  # of a list of public swarms
FILE = "public_swarms.json"
USER_FILE = "swarms.json"
MAX_LIST_BYTES = 1 << 20
MOST_LISTED = 8  # names in an error
WHAT = "a list of swarms"


class PublicSwarm(msgspec.Struct, frozen=True):
    """Entry in a list of public swarms: the name, the invite and a description."""

    name: str
    invite: str
    about: str = ""


class _List(VersionedFile):
    swarms: tuple[PublicSwarm, ...] = ()


def known_swarms(home: Path) -> dict[str, PublicSwarm]:
    """Return the public swarms by name. The user's own list takes precedence over the package's.

    Raises UsageError if a list cannot be read or has a damaged invite.
    """
    shipped = resources.files("swarmnode.swarm.storage").joinpath(FILE).read_bytes()
    lists, path = [_parse(shipped, FILE)], home / USER_FILE
    own = read_user_file(path, max_bytes=MAX_LIST_BYTES, what=WHAT)
    if own is not None:
        lists.append(_parse(own, str(path)))
    return {swarm.name: swarm for swarms in lists for swarm in swarms}


def _parse(data: bytes, source: str) -> tuple[PublicSwarm, ...]:
    content = parse_versioned(data, _List, source=source, what=WHAT, newest=FORMAT)
    for swarm in content.swarms:
        decode_invite(swarm.invite)
    return content.swarms


def find_name(text: str, names: Iterable[str]) -> str | None:
    """Return the name that `text` is, or else the only one that begins with it, also in other capitals.

    Returns None if `text` is empty, or begins no name or several."""
    known = set(names)
    if not text or text in known:
        return text or None
    for begun in (
        [name for name in known if name.startswith(text)],
        [name for name in known if name.lower().startswith(text.lower())],
    ):
        if begun:
            return begun[0] if len(begun) == 1 else None
    return None


def name_advice(text: str, names: Iterable[str], *, none: str) -> str:
    """Return the clause of an error that helps to the right name, where `find_name` returned None: the names that `text` begins, or
    similar ones, or else all; `none` if there are no names."""
    known = sorted(set(names))
    begun = [name for name in known if name.lower().startswith(text.lower())] if text else []
    by_lower = {name.lower(): name for name in known}
    similar = begun or [by_lower[each] for each in difflib.get_close_matches(text.lower(), by_lower)]
    if similar:
        return f"did you mean {' or '.join(similar[:MOST_LISTED])}?"
    more = ", …" if len(known) > MOST_LISTED else ""
    return f"known here: {', '.join(known[:MOST_LISTED])}{more}" if known else none


class _FoundersFile(msgspec.Struct):
    """Part of a founder's file that tells which swarm it is of."""

    id: str


class JoinedSwarms:
    """Swarms that were joined or founded with one home folder, by name."""

    def __init__(self, home: Path) -> None:
        self._folder = home / FOLDER

    def names(self) -> list[str]:
        """Return the names of all joined and founded swarms, sorted."""
        return sorted({path.stem for path in self._folder.glob("*") if path.suffix in (SUFFIX, LINK)})

    def invite_to(self, name: str) -> str | None:
        """Return the invite remembered under this name; None if there is none. Raises UsageError if it cannot be read."""
        return self._read(f"{name}{SUFFIX}") if _is_plain(name) else None

    def file_of(self, name: str) -> Path | None:
        """Return the founder's file of the swarm with this name; None if the swarm was not founded with this home. The file may be
        gone."""
        try:
            return (self._folder / f"{name}{LINK}").readlink() if _is_plain(name) else None
        except OSError:
            return None

    def remember(self, invite: str, name: str = "") -> str:
        """Keep an invite under `name`, by default its swarm's name, and return that name.

        A newer invite to the same swarm replaces the old one. Raises UsageError if the invite is damaged or the name is
        not possible or another swarm's, LocalError if the file cannot be written.
        """
        invited = decode_invite(invite)
        name = name or invited.name
        if not _is_plain(name) or name != name.strip() or name.startswith("-"):
            raise UsageError(f"{name!r} cannot be a name in commands and of a file; choose another one with --as")
        if self._id_of(name) not in (None, invited.swarm_id.hex()):
            raise UsageError(f"{name} is another swarm that has this name here; choose another name with --as")
        write_private(self._folder / f"{name}{SUFFIX}", f"{invite}\n".encode(), make_folder=True)
        return name

    def remember_file(self, file: Path) -> str:
        """Give the swarm of a founder's file a name, by default that of the file, make it the one used last, and return the name.

        If another swarm has that name, the beginning of the swarm's id follows it. Raises UsageError if the file cannot be
        read, OSError if the name cannot be written.
        """
        target, swarm = file.absolute(), _id_in(file)
        name = file.stem
        if swarm is not None and self._id_of(name) not in (None, swarm):
            name = f"{name}-{swarm[:8]}"
        make_private(self._folder)
        new = self._folder / f".{name}{LINK}.{os.getpid()}"
        new.unlink(missing_ok=True)
        new.symlink_to(target)
        new.replace(self._folder / f"{name}{LINK}")
        self.used(name)
        return name

    def forget(self, name: str) -> None:
        """Remove a name, with the invite under it. The founder's own file stays. Does nothing if the name is unknown."""
        if not _is_plain(name):
            return
        if self.last in (name, str(self.file_of(name))):
            (self._folder / LAST).unlink(missing_ok=True)
        for suffix in (SUFFIX, LINK):
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)

    def all_names(self) -> list[str]:
        """Return the names of all joined, founded and public swarms, sorted. Raises UsageError if the list of public ones cannot be
        read."""
        return sorted({*self.names(), *known_swarms(self._folder.parent)})

    def _id_of(self, name: str) -> str | None:
        """Return the id of the swarm that has this name, in hex; None if there is none, or its file is gone."""
        file = self.file_of(name)
        if file is not None:
            return _id_in(file)
        invite = self.invite_to(name)
        return None if invite is None else decode_invite(invite).swarm_id.hex()

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


def _id_in(file: Path) -> str | None:
    """Return the id of the swarm that a founder's file is of, in hex; None if there is no such file. Raises UsageError if it cannot
    be read."""
    data = read_user_file(file, max_bytes=MAX_SWARM_FILE_BYTES, what="a .swarm file")
    if data is None:
        return None
    return parse_user_file(data, _FoundersFile, source=file, what="a .swarm file").id


def _is_plain(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".") and name.isprintable()
