"""The swarm that a command is about: a file, an invite, a name, a line on standard input, or the swarm used last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from swarmnode.cli.options.option import argument
from swarmnode.cli.terminal.console import fail
from swarmnode.cli.terminal.standard_input import STANDARD_INPUT, read_line

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm

_WAYS = "A .swarm file or its name, an invite, the name of a joined or public swarm, or - for standard input"
SWARM = argument("", f"{_WAYS}; default: the one you used last.", metavar="[SWARM]")
THIS_SWARM = argument(..., f"{_WAYS}.", metavar="SWARM")  # if another argument follows
SWARM_FILE = argument(..., "The .swarm file, or its name.", metavar="SWARM")


def open_swarm(text: str, home: Path) -> Swarm:
    """Return the swarm that `text` names, and remember it as the one used last. Ends the command if `text` is empty and no swarm
    was used before. Raises UsageError."""
    from swarmnode.swarm.records.invite import looks_like_invite
    from swarmnode.swarm.storage.named_swarms import JoinedSwarms
    from swarmnode.swarm.storage.swarmfile import load_swarm, swarm_path

    joined = JoinedSwarms(home)
    if text == STANDARD_INPUT:
        text = read_line()
    text = (
        text or joined.last or fail("which swarm? Give a .swarm file, an invite or a name; you have used none yet", 2)
    )
    swarm = load_swarm(text, home)
    if not looks_like_invite(text):
        path = swarm_path(text)
        joined.used(str(path.absolute()) if path.exists() else text)
    return swarm


def swarm_file(text: str) -> Path:
    """Return the path of the founder's own .swarm file; end the command if there is none. Raises UsageError."""
    from swarmnode.swarm.storage.swarmfile import swarm_path

    path = swarm_path(text)
    if not path.exists():
        fail(f"{path}: no such file; this needs the .swarm file and the owner's key", 2)
    return path
