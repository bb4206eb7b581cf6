"""The swarm that a command is about: a file, an invite, a name, a line on standard input, or the swarm used last."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Context

from swarmnode.errors import SwarmnodeError
from swarmnode.terminal.console import STANDARD_INPUT, fail, home_folder, read_line, say
from swarmnode.terminal.option import argument

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm


def home_of(context: Context) -> Path:
    """Return the home folder that the line typed so far means, for completion."""
    return home_folder(context.params.get("home"))


def complete_swarms(context: Context, incomplete: str) -> list[str]:
    """Return the names of swarms that begin with `incomplete`; none if a list of them cannot be read."""
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms

    try:
        return [name for name in JoinedSwarms(home_of(context)).all_names() if name.startswith(incomplete)]
    except SwarmnodeError:
        return []


def complete_adapters(context: Context, incomplete: str) -> list[str]:
    """Return the names of adapters that begin with `incomplete`: those that the swarm on the line, else the one used last, was
    founded with, and those of this home. Returns none if the swarm is unknown."""
    from swarmnode.swarm.storage.own_adapters import OwnAdapters
    from swarmnode.swarm.storage.remembered import ManifestCache
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_swarm

    home = home_of(context)
    # click parses nothing before an unfinished option
    typed = context.params.get("swarm") or next(iter(context.args), "")
    try:
        swarm = load_swarm(typed or JoinedSwarms(home).last or "", home)
        raw = ManifestCache(home).get(swarm.id) if swarm.manifest is None else None
        known = swarm if raw is None else swarm.with_manifest(raw)
        names = {own.terms.name for own in OwnAdapters(home, swarm.id).all()}
    except SwarmnodeError:
        return []
    names.update(known.manifest.adapter_names if known.manifest else ())
    return sorted(name for name in names if name.startswith(incomplete))


_WAYS = "The swarm's name, .swarm file or invite; - reads it from a pipe"
INVITE_VARIABLE = "SWARMNODE_INVITE"  # for containers and services: a command line can be read by other users
_COMPLETED = {"autocompletion": complete_swarms}
SWARM = argument("", f"{_WAYS}; default: {INVITE_VARIABLE}, or the one used last.", metavar="[SWARM]", **_COMPLETED)
THIS_SWARM = argument(..., f"{_WAYS}.", metavar="SWARM", **_COMPLETED)  # if another argument follows
SWARM_FILE = argument(..., "Your .swarm file, or the name of a swarm that you founded.", metavar="SWARM", **_COMPLETED)


def open_swarm(text: str, home: Path) -> Swarm:
    """Return the swarm that `text` names, and remember it as the one used last. If `text` is empty, the invite in the environment
    counts, else the swarm used last; ends the command if there is neither. Raises UsageError."""
    from swarmnode.swarm.records.invite import looks_like_invite
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, find_name, load_swarm, swarm_path

    joined = JoinedSwarms(home)
    if text == STANDARD_INPUT:
        text = read_line()
    text = text or os.environ.get(INVITE_VARIABLE, "").strip() or joined.last or ""
    if not text:
        fail("which swarm? Give a .swarm file, an invite or a name; you have used none yet", 2)
    swarm = load_swarm(text, home)
    if not looks_like_invite(text):
        path = swarm_path(text)
        joined.used(str(path.absolute()) if path.exists() else find_name(text, joined.all_names()) or text)
    return swarm


def full_name(text: str, names: Iterable[str], unknown: str, *, none: str) -> str:
    """Return the name that `text` is, or begins alone. Else end the command with the sentence `unknown` and the names that may be
    meant, or with `none` if there are no names."""
    from swarmnode.swarm.storage.swarmfile import find_name, name_advice

    known = list(names)
    return find_name(text, known) or fail(f"{unknown}; {name_advice(text, known, none=none)}", 2)


def name_swarm(file: Path, home: Path) -> str:
    """Let commands in any folder know a founder's swarm by the name of its file, and return what a user types for it: that name
    (with the beginning of the swarm's id if another swarm has it), or the path after a note if the name cannot be kept."""
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms

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
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, find_name, name_advice, swarm_path

    path = swarm_path(text)
    if path.exists():
        return path
    joined = JoinedSwarms(home)
    founded = [name for name in joined.names() if joined.file_of(name)]
    named = joined.file_of(find_name(text, founded) or text)
    if named is None or not named.exists():
        advice = name_advice(path.name, founded, none="only the machine that founded the swarm has them")
        fail(f"{named or path}: no such file; this needs the .swarm file and the owner's key; {advice}", 2)
    return named
