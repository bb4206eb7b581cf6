"""`NAME.swarm`, the founder's own file, and `load_swarm`, which accepts it or an invite.

The file has the manifest, the place of the founder's checkpoint, the identity of the bootstrap peer that invites name,
and for a private swarm a grant for the host's own machines. It is private to the host (mode 0600). Invites are handed
out instead.

Swarms by name: joined swarms, swarms founded here, public swarms, and the swarm used last.

HOME/swarms/friends.invite   the invite, readable by its owner alone.
HOME/swarms/friends.swarm    link to the founder's own .swarm file.
HOME/swarms/last             the last used name, or path of a .swarm file
HOME/swarms.json             public swarms, in addition to those of the package
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path

import msgspec

from swarmnode.errors import ProtocolError, UsageError
from swarmnode.files import home_folder, make_private, write_private
from swarmnode.net.addressing.addresses import is_loopback
from swarmnode.swarm.records.invite import (
    Invite,
    OwnedInvite,
    decode_invite,
    encode_invite,
    is_owners,
    is_plain_address,
    looks_like_invite,
)
from swarmnode.swarm.records.manifest import PRIVATE, Manifest, decode_manifest, swarm_id
from swarmnode.swarm.storage.owner_files import open_issued_invites
from swarmnode.swarm.storage.small_files import (
    VersionedFile,
    is_user_file,
    load_user_file,
    parse_versioned,
    read_user_file,
)

FOLDER = "swarms"
INVITE_SUFFIX = ".invite"
LINK = ".swarm"  # the suffix of a founder's file
LAST = "last"
MAX_NAME_BYTES = 1 << 16
FORMAT = 1  # of a list of public swarms
FILE = "public_swarms.json"
USER_FILE = "swarms.json"
MAX_LIST_BYTES = 1 << 20
MOST_LISTED = 8  # names in an error
LIST_WHAT = "a list of swarms"


class PublicSwarm(msgspec.Struct, frozen=True):
    """Entry in a list of public swarms: the name, the invite and a description."""

    name: str
    invite: str
    about: str = ""


class _List(VersionedFile):
    swarms: tuple[PublicSwarm, ...] = ()


def public_swarms(home: Path) -> dict[str, PublicSwarm]:
    """Return the public swarms by name. The user's own list takes precedence over the package's.

    Raises UsageError if a list cannot be read or has a damaged invite.
    """
    shipped = resources.files("swarmnode.swarm.storage").joinpath(FILE).read_bytes()
    lists, path = [_parse(shipped, FILE)], home / USER_FILE
    own = read_user_file(path, max_bytes=MAX_LIST_BYTES, what=LIST_WHAT)
    if own is not None:
        lists.append(_parse(own, str(path)))
    return {swarm.name: swarm for swarms in lists for swarm in swarms}


def _parse(data: bytes, source: str) -> tuple[PublicSwarm, ...]:
    content = parse_versioned(data, _List, source=source, what=LIST_WHAT, newest=FORMAT)
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
        return sorted({path.stem for path in self._folder.glob("*") if path.suffix in (INVITE_SUFFIX, LINK)})

    def invite_to(self, name: str) -> str | None:
        """Return the invite remembered under this name; None if there is none. Raises UsageError if it cannot be read."""
        return self._read(f"{name}{INVITE_SUFFIX}") if _is_plain(name) else None

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
        write_private(self._folder / f"{name}{INVITE_SUFFIX}", f"{invite}\n".encode(), make_folder=True)
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
        for suffix in (INVITE_SUFFIX, LINK):
            (self._folder / f"{name}{suffix}").unlink(missing_ok=True)

    def all_names(self) -> list[str]:
        """Return the names of all joined, founded and public swarms, sorted. Raises UsageError if the list of public ones cannot be
        read."""
        return sorted({*self.names(), *public_swarms(self._folder.parent)})

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
        data = read_user_file(self._folder / file, max_bytes=MAX_NAME_BYTES, what="the name of a swarm, or an invite")
        return None if data is None else data.decode(errors="replace").strip()


def _id_in(file: Path) -> str | None:
    """Return the id of the swarm that a founder's file is of, in hex; None if there is no such file. Raises UsageError if it cannot
    be read."""
    content = load_user_file(file, _FoundersFile, max_bytes=MAX_FILE_BYTES, what=WHAT)
    return None if content is None else content.id


def _is_plain(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".") and name.isprintable()


SUFFIX = ".swarm"
MAX_FILE_BYTES = 4 << 20
WHAT = f"a {SUFFIX} file"
AS_IN_FILE = ("bootstraps", "original", "bootstrap_key", "bootstrap_listen", "signature", "grant", "secret")


@dataclass(frozen=True)
class Swarm:
    """A swarm as this machine knows it: from an invite (without a manifest yet), or from the founder's own file.

    Attributes:
        id: SHA-256 of the manifest.
        name: Name for display.
        bootstraps: Multiaddrs of bootstrap peers, with /p2p/.
        manifest_bytes: Manifest as the founder encoded it; None if it has not been fetched yet.
        manifest: The decoded manifest; None if it has not been fetched yet.
        checkpoint: Local folder with the whole checkpoint, only a hint.
        original: Path or hub id of the quantised checkpoint or encoder that `checkpoint` was made of; empty if there was none.
        adapters: Local folder with the files of the adapters.
        bootstrap_key: Private key bytes that make this host the bootstrap peer of invites.
        bootstrap_listen: Listen addresses of that bootstrap peer.
        owner: Public key of the owner; empty if the swarm has none.
        signature: The owner's signature of the id.
        private: Whether only peers that the owner invited belong to the swarm.
        grant: Grant of the invite that this machine uses, for a private swarm.
        secret: Private key of that invite.
        revocations: Newest revocation list in the owner's list of invites.
        file: The founder's own file, if the swarm was read from one.
    """

    id: bytes
    name: str
    bootstraps: tuple[str, ...] = ()
    manifest_bytes: bytes | None = None
    manifest: Manifest | None = None
    checkpoint: Path | None = None
    original: str = ""
    adapters: Path | None = None
    bootstrap_key: bytes | None = None
    bootstrap_listen: tuple[str, ...] = ()
    owner: bytes = b""
    signature: bytes = b""
    private: bool = False
    grant: bytes = b""
    secret: bytes = b""
    revocations: bytes = b""
    file: Path | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        known = "manifest" if self.manifest is not None else "no manifest yet"
        return f"<Swarm {self.name} {self.id.hex()[:12]} {known}, {len(self.bootstraps)} bootstraps>"

    @property
    def invite(self) -> str:
        """The line of text to hand out. To a private swarm it grants nothing: `swarmnode invite` makes invites with a
        grant."""
        if self.owner:
            return encode_invite(
                OwnedInvite(self.id, self.name, self.bootstraps, self.owner, self.signature, self.private)
            )
        return encode_invite(Invite(self.id, self.name, self.bootstraps))

    @property
    def reaches_others(self) -> bool:
        """Whether other machines can find the swarm: a bootstrap address is not a loopback address."""
        return not all(is_loopback(address) for address in self.bootstraps)

    def with_manifest(self, raw: bytes) -> Swarm:
        """Return this swarm with its manifest. Raises ProtocolError if the bytes are not valid, another swarm's, or not
        signed by the owner."""
        if swarm_id(raw) != self.id:
            raise ProtocolError("the manifest's hash is not the swarm's id")
        manifest = decode_manifest(raw)
        if (manifest.membership == PRIVATE) != self.private:
            raise ProtocolError("the manifest and the invite differ in who may join: the invite was tampered with")
        if manifest.owner != self.owner or (self.owner and not is_owners(self.id, self.owner, self.signature)):
            raise ProtocolError(
                "the manifest is not signed by its owner: the invite is not the owner's; ask for another"
            )
        return replace(self, manifest_bytes=bytes(raw), manifest=manifest)


class _SwarmFile(VersionedFile, kw_only=True):
    name: str = ""  # for human readers, as is the id
    id: str = ""
    manifest: bytes
    bootstraps: tuple[str, ...] = ()
    checkpoint: str | None = None
    original: str = ""
    adapters: str | None = None
    bootstrap_key: bytes | None = None
    bootstrap_listen: tuple[str, ...] = ()
    signature: bytes = b""
    grant: bytes = b""
    secret: bytes = b""


def new_swarm(manifest_bytes: bytes, signature: bytes = b"") -> Swarm:
    """Return the swarm of a manifest, with its owner's signature if it has an owner. Raises ProtocolError if either is
    not valid."""
    manifest = decode_manifest(manifest_bytes)
    private = manifest.membership == PRIVATE
    swarm = Swarm(swarm_id(manifest_bytes), manifest.name, owner=manifest.owner, signature=signature, private=private)
    return swarm.with_manifest(manifest_bytes)


def save_swarm(swarm: Swarm, path: Path) -> None:
    """Write the .swarm file atomically, readable by its owner alone.

    Raises LocalError if it cannot be written, ValueError if the swarm has no manifest.
    """
    if swarm.manifest_bytes is None:
        raise ValueError("a swarm known from an invite alone has no file")
    content = _SwarmFile(
        swarmnode=FORMAT,
        name=swarm.name,
        id=swarm.id.hex(),
        manifest=swarm.manifest_bytes,
        checkpoint=None if swarm.checkpoint is None else str(swarm.checkpoint.absolute()),
        adapters=None if swarm.adapters is None else str(swarm.adapters.absolute()),
        **{name: getattr(swarm, name) for name in AS_IN_FILE},
    )
    write_private(path, json.dumps(msgspec.to_builtins(content), indent=1).encode())


def load_swarm(source: str | Path, home: Path | None = None) -> Swarm:
    """Return the swarm described by a .swarm file, an invite, a file with an invite in it, or a name.

    The suffix .swarm may be left out. A file keeps the invite out of the list of processes. Names are those of joined
    and founded swarms (`swarmfile.py`) and of public swarms, in the package's list and in `swarms.json` of the home folder.
    The beginning of a name is enough if no other name begins so. `home` is None for the usual home folder. Raises UsageError if
    `source` is none of these or is damaged.
    """
    if isinstance(source, str) and looks_like_invite(source):
        return _invited(source)
    home, path = home_folder(home), swarm_path(source)
    if not is_user_file(path):
        full = find_name(str(source), JoinedSwarms(home).all_names())
        named = None if full is None else load_named(full, home)
        if named is not None:
            return named
    data = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT)
    if data is None:
        ways = (
            f"give the path of a {SUFFIX} file, an invite (swarm1… or swarm2…), or the name of a public swarm or "
            "of one that you joined"
        )
        known = JoinedSwarms(home).all_names()
        advice = name_advice(path.name, known, none=ways)
        raise UsageError(
            f"{path}: no such file" + (f", and no swarm of this name here; {advice}" if known else f"; {advice}")
        )
    text = data.decode(errors="replace")
    return _invited(text) if looks_like_invite(text) else _decode(data, path)


def load_named(name: str, home: Path) -> Swarm | None:
    """Return the swarm that is called `name` here; None if there is none.

    Raises UsageError if its invite is damaged, or the founder's file is gone or damaged.
    """
    named = _named(name, home)
    if named is None or isinstance(named, str):
        return None if named is None else _invited(named)
    data = read_user_file(named, max_bytes=MAX_FILE_BYTES, what=WHAT)
    if data is None:
        raise UsageError(
            f"{named}, the file of {name}, is gone; give its new path, or forget it: swarmnode leave {shlex.quote(name)}"
        )
    return _decode(data, named)


def load_all_named(home: Path) -> dict[str, Swarm]:
    """Return the swarms that were joined or founded with this home, by name, without those whose file is gone or damaged."""
    found = {}
    for name in JoinedSwarms(home).names():
        with contextlib.suppress(UsageError):
            swarm = load_named(name, home)
            if swarm is not None:
                found[name] = swarm
    return found


def swarm_path(source: str | Path) -> Path:
    """Return the path that `source` means: `friends` is `friends.swarm` if there is no file `friends`."""
    path = Path(source)
    full = path.with_name(path.name + SUFFIX) if path.name else path
    return full if is_user_file(full) and not is_user_file(path) else path


def names_a_swarm(source: str, home: Path) -> bool:
    """Return whether `source` is an invite, an existing file or a known name."""
    return looks_like_invite(source) or is_user_file(swarm_path(source)) or _named(source, home) is not None


def _named(name: str, home: Path) -> str | Path | None:
    """Return the founder's file of the swarm called `name`, else an invite to it; None if the name is unknown. A file that is gone
    counts only if there is no invite."""
    joined = JoinedSwarms(home)
    file, invite = joined.file_of(name), joined.invite_to(name)
    if file is not None and (is_user_file(file) or invite is None):
        return file
    public = public_swarms(home).get(name)
    return invite or (public.invite if public is not None else None)


def _invited(text: str) -> Swarm:
    invite = decode_invite(text)
    fields = msgspec.structs.asdict(invite)
    return Swarm(fields.pop("swarm_id"), **fields)


def _decode(data: bytes, path: Path) -> Swarm:
    content = parse_versioned(data, _SwarmFile, source=path, what=WHAT, newest=FORMAT)
    try:
        swarm = new_swarm(content.manifest, content.signature)
    except ProtocolError as error:
        raise UsageError(f"{path} cannot be used: {error}") from None
    if not all(map(is_plain_address, content.bootstraps)) or not all(map(str.isprintable, content.bootstrap_listen)):
        raise UsageError(
            f"{path} cannot be used: an address of its bootstrap peers is none; ask its host for another file"
        )
    return replace(
        swarm,
        checkpoint=None if content.checkpoint is None else Path(content.checkpoint),
        adapters=None if content.adapters is None else Path(content.adapters),
        revocations=open_issued_invites(path).revocations if swarm.owner else b"",
        file=path,
        **{name: getattr(content, name) for name in AS_IN_FILE},
    )
