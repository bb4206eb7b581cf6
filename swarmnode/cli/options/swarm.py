"""The swarm that a command is about (a file, an invite, a name, a line on standard input, or the swarm used last), and a client
of it for commands that ask: their options of trust and patience, without torch where they need none."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Context

from swarmnode.errors import SwarmnodeError
from swarmnode.terminal.console import (
    STANDARD_INPUT,
    CollectorPause,
    fail,
    home_folder,
    joined,
    read_line,
    run_async,
    say,
)
from swarmnode.terminal.option import argument, option
from swarmnode.terminal.progress import spinner

if TYPE_CHECKING:
    from swarmnode.client.swarm_client import SwarmClient
    from swarmnode.swarm.records.announcement import Trust
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


def patience_option(seconds: float, help_text: str) -> Any:
    """Define the option --patience: `seconds` by default, at most a week."""
    return option(seconds, help_text, "--patience", min=0.0, max=7 * 86_400.0, metavar="SECONDS")


def _trust(words: Sequence[str], _flag: str) -> Trust:
    from swarmnode.swarm.records.announcement import parse_trust

    return parse_trust(words)


PATIENCE = patience_option(60.0, "How long to wait for machines that hold the model.")
TRUST = option(
    [],
    "Let only these machines compute; see docs/security.md. Repeatable.",
    "--trust",
    metavar="PEER|group:NAME|net:CIDR",
    parse=_trust,
)


def ask(swarm: str | Swarm, home: Path, question: Callable[[SwarmClient], Any]) -> Any:
    """Join the swarm (as the user named it, or opened already), return the result of `question`, awaited if it is awaitable, and
    leave. Raises UsageError, NetworkDown, NotAdmitted."""

    async def ask_client(stop: asyncio.Event) -> Any:
        loaded = open_swarm(swarm, home) if isinstance(swarm, str) else swarm
        with spinner(f"Joining {loaded.name}"):
            from swarmnode.client.swarm_client import SwarmClient

            client = await joined(SwarmClient.join(loaded, home=home), stop)
        async with client:
            answer = question(client)
            return await answer if inspect.isawaitable(answer) else answer

    return run_async(ask_client)


@contextlib.asynccontextmanager
async def asking(
    swarm: str, home: Path, stop: asyncio.Event, *, patience_s: float, trust: Trust, needs_torch: bool = False
) -> AsyncIterator[SwarmClient]:
    """Join the swarm, yield a client for one question or conversation, and leave. Raises UsageError, NetworkDown, NotAdmitted;
    Interrupted if `stop` is set before the swarm is joined."""
    with CollectorPause():
        loaded = open_swarm(swarm, home)
        with spinner(f"Joining {loaded.name}"):
            from swarmnode.client.swarm_client import SwarmClient  # takes seconds on a slow machine

            joining = SwarmClient.join(loaded, home=home, patience_s=patience_s, trust=trust, audit_share=0.0)
            client = await joined(joining, stop)
    if not needs_torch:
        leave_torch_out()
    async with client:
        yield client


def leave_torch_out() -> None:
    """Prevent this process from importing torch: it computes nothing, and transformers' tokenizers load in a fourth of the time
    without torch. Not for a process that stays and audits others' results, because audits need torch."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else transformers warns that torch is missing
