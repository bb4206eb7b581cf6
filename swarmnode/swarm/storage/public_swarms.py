"""Public swarms by name: the list that ships with the package, and the user's own `swarms.json` beside it.

    {"swarmnode": 1, "swarms": [{"name": "tiny", "invite": "swarm2…", "about": "what it serves"}]}

An invite of a public swarm is signed by the swarm's owner; a list says under which name it is known, and nothing more.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from swarmnode.swarm.records.invite import decode_invite
from swarmnode.swarm.storage.user_file import VersionedFile, parse_versioned, read_user_file

FORMAT = 1
FILE = "public_swarms.json"
USER_FILE = "swarms.json"
MAX_FILE_BYTES = 1 << 20
WHAT = "a list of swarms"


class PublicSwarm(msgspec.Struct, frozen=True):
    """One entry of a list."""

    name: str
    invite: str
    about: str = ""


class _List(VersionedFile):
    swarms: tuple[PublicSwarm, ...] = ()


def known_swarms(home: Path | None) -> dict[str, PublicSwarm]:
    """By name; an entry of the user's own list counts before one of the package's. Raises UsageError."""
    shipped = resources.files("swarmnode.swarm.storage").joinpath(FILE).read_bytes()
    lists = [_parse(shipped, FILE)]
    if home is not None:
        path = home / USER_FILE
        own = read_user_file(path, max_bytes=MAX_FILE_BYTES, what=WHAT)
        if own is not None:
            lists.append(_parse(own, str(path)))
    return {swarm.name: swarm for swarms in lists for swarm in swarms}


def find_public_swarm(name: str, home: Path | None) -> str | None:
    """The invite to the public swarm of that name; None where no list knows it. Raises UsageError."""
    known = known_swarms(home).get(name)
    return None if known is None else known.invite


def _parse(data: bytes, source: str) -> tuple[PublicSwarm, ...]:
    content = parse_versioned(data, _List, source=source, what=WHAT, newest=FORMAT)
    for swarm in content.swarms:
        decode_invite(swarm.invite)
    return content.swarms
