"""The swarm that a command is about: a file, an invite, a name, a line on standard input, or the swarm used last."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.errors import SwarmnodeError
from swarmnode.terminal.console import STANDARD_INPUT, fail, read_line, say
from swarmnode.terminal.option import argument

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm

_WAYS = "The swarm's name, .swarm file or invite; - reads it from a pipe"
INVITE_VARIABLE = "SWARMNODE_INVITE"  # for containers and services: a command line can be read by other users
SWARM = argument("", f"{_WAYS}; default: {INVITE_VARIABLE}, or the one used last.", metavar="[SWARM]")
THIS_SWARM = argument(..., f"{_WAYS}.", metavar="SWARM")  # if another argument follows
SWARM_FILE = argument(..., "Your .swarm file, or the name of a swarm that you founded.", metavar="SWARM")


def open_swarm(text: str, home: Path) -> Swarm:
    """Return the swarm that `text` names, and remember it as the one used last. If `text` is empty, the invite in the environment
    counts, else the swarm used last; ends the command if there is neither. Raises UsageError."""
    from swarmnode.swarm.records.invite import looks_like_invite
    from swarmnode.swarm.storage.named_swarms import JoinedSwarms
    from swarmnode.swarm.storage.swarmfile import load_swarm, swarm_path

    joined = JoinedSwarms(home)
    if text == STANDARD_INPUT:
        text = read_line()
    text = text or os.environ.get(INVITE_VARIABLE, "").strip() or joined.last or ""
    if not text:
        fail("which swarm? Give a .swarm file, an invite or a name; you have used none yet", 2)
    swarm = load_swarm(text, home)
    if not looks_like_invite(text):
        path = swarm_path(text)
        joined.used(str(path.absolute()) if path.exists() else text)
    return swarm


def name_swarm(file: Path, home: Path) -> str:
    """Let commands in any folder know a founder's swarm by the name of its file, and return what a user types for it: that name
    (with the beginning of the swarm's id if another swarm has it), or the path after a note if the name cannot be kept."""
    from swarmnode.swarm.storage.named_swarms import JoinedSwarms

    try:
        return JoinedSwarms(home).remember_file(file)
    except (OSError, SwarmnodeError) as error:
        say(
            f"Note: commands in other folders need the path of {file}, because its name cannot be kept: {error}",
            err=True,
        )
        return str(file)


def swarm_file(text: str, home: Path) -> Path:
    """Return the path of the founder's own .swarm file, which `text` is the path or the name of; end the command if there is
    none."""
    from swarmnode.swarm.storage.named_swarms import JoinedSwarms
    from swarmnode.swarm.storage.swarmfile import swarm_path

    path = swarm_path(text)
    if path.exists():
        return path
    joined = JoinedSwarms(home)
    named = joined.file_of(text)
    if named is None or not named.exists():
        similar = " or ".join(name for name in joined.similar(path.name) if joined.file_of(name))
        advice = f"; did you mean {similar}?" if similar else ""
        fail(f"{named or path}: no such file; this needs the .swarm file and the owner's key{advice}", 2)
    return named
