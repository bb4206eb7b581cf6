"""Commands `swarmnode join` and `leave`: remember a swarm under its name, and forget it."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmnode.cli.options.node_options import parse_name
from swarmnode.cli.options.swarm import complete_swarms, full_name
from swarmnode.counting import counted
from swarmnode.terminal.console import (
    HOME,
    JSON,
    MAX_LINE_BYTES,
    STANDARD_INPUT,
    command,
    fail,
    is_piped,
    print_json,
    read_line,
    say,
)
from swarmnode.terminal.console import ask as ask_for
from swarmnode.terminal.option import argument, option

if TYPE_CHECKING:
    from swarmnode.swarm.storage.swarmfile import Swarm


@command
def join(
    invite: str = argument(
        "",
        "The invite that you received, a file with it, or - for standard input; default: ask for it.",
        metavar="[INVITE]",
    ),
    name: str = option("", "Your name, as others see it; default: the name of this machine.", parse=parse_name),
    swarm_name: str = option("", "Remember the swarm under this name; default: its own.", "--as", metavar="NAME"),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Join a swarm by the invite that you were sent.

    Then `swarmnode run NAME`, `generate NAME` and `status NAME` work everywhere.

    Example: swarmnode join
    """
    from swarmnode.swarm.records.invite import decode_invite
    from swarmnode.swarm.storage.remembered import own_name, store_own_name
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms

    text = _invite(invite)
    terms = _terms(decode_invite(text))
    joined = JoinedSwarms(home)
    known_as = joined.remember(text, swarm_name)
    joined.used(known_as)
    lends = terms["role"] != "client"
    if lends and (chosen := _own_name(name, own_name(home), is_private=terms["private"], asks=not as_json)):
        store_own_name(home, chosen)
    if as_json:
        print_json({"name": known_as, **terms, "own_name": own_name(home)})
        return
    say(f"Joined {known_as}: {_say(terms)}.")
    if lends and (known := own_name(home)):
        say(f"Others see this machine as {known}.")
    say("Your first command will show whether the swarm answers and admits you:")
    quoted = shlex.quote(known_as)
    if lends:
        say(f"  swarmnode run {quoted}   # lends this machine")
    say(f"  swarmnode chat {quoted}  # uses the swarm")


@command
def leave(
    name: str = argument(
        ..., "Name of a swarm that you joined or founded.", metavar="NAME", autocompletion=complete_swarms
    ),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Forget a swarm: its name, your invite and your membership.

    It undoes `join`. To let a node leave and keep the name: swarmnode stop.

    Example: swarmnode leave friends
    """
    from swarmnode.errors import UsageError
    from swarmnode.lending.control import process_of, running_gateways, running_nodes
    from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_all_named, load_named

    joined = JoinedSwarms(home)
    name = full_name(name, joined.names(), f"no swarm is called {name} here", none="you have joined none")
    try:
        swarm = load_named(name, home)
    except UsageError:  # only the name can be forgotten
        swarm = None
    removed, remaining = list[Path](), list[str]()
    if swarm is not None:
        if process := process_of(swarm.id, *running_nodes(home).values(), *running_gateways(home).values()):
            end = f"`swarmnode stop {shlex.quote(name)}`, or Ctrl-C"
            fail(f"process {process['pid']} still takes part in {name}: end it first with {end}")
        if all(known == name or other.id != swarm.id for known, other in load_all_named(home).items()):
            removed = list((home / "membership").glob(f"{swarm.id.hex()[:16]}-*.json"))
        remaining = list(_remaining(swarm, name, home))
    elif (file := joined.file_of(name)) is not None and file.exists():
        remaining = [str(file)]
    joined.forget(name)
    for path in removed:
        path.unlink(missing_ok=True)
    if as_json:
        print_json({"name": name, "memberships": len(removed), "kept": remaining})
        return
    say(f"Forgot {name}" + (", your invite and your membership." if removed else "."))
    for what in remaining:
        say(f"Kept: {what}")


def _remaining(swarm: Swarm, name: str, home: Path) -> Iterator[str]:
    """Yield what `leave` does not remove, each with the command or the reason."""
    from swarmnode.cli.lend.services import Service
    from swarmnode.swarm.records.receipt import receipts_of
    from swarmnode.swarm.storage.chunk_folder import FOLDER, folder_name, used_bytes

    if swarm.file is not None:
        yield f"{swarm.file}, your own file of the swarm"
    weights = home / FOLDER / folder_name(swarm.id)
    if weights.is_dir():
        yield f"{used_bytes(weights) / 1e9:.2f} GB of weights; to remove them: swarmnode models prune {weights.name}"
    if receipts_of(home, swarm.id).is_dir():
        yield "the receipts of your work"
    if Service(name).swarm.exists():
        yield f"the service {name}; to remove it: swarmnode service uninstall {shlex.quote(name)}"


def _own_name(chosen: str, stored: str, *, is_private: bool, asks: bool) -> str:
    """Return the name to keep as the owner's: the given one, else the answer to a question if there is a terminal.

    Without a terminal it is this machine's name in a private swarm, and empty in others, whose members may be strangers. Returns an
    empty text if a name is `stored` already. Raises UsageError if the answer cannot be a name.
    """
    from swarmnode.swarm.storage.remembered import machine_name

    if chosen or stored:
        return chosen
    if not asks or is_piped():
        return machine_name() if is_private else ""
    return parse_name(ask_for("Your name, as others see it", default=machine_name()).strip())


def _invite(text: str) -> str:
    """Return the invite: the argument itself, or the line in a file, on standard input or from the prompt. Ends the command if
    there is none."""
    from swarmnode.swarm.records.invite import looks_like_invite
    from swarmnode.swarm.storage.small_files import read_user_file

    if text in ("", STANDARD_INPUT):
        text = _line(ask=not text and not is_piped())
    if not looks_like_invite(text):
        data = read_user_file(Path(text), max_bytes=MAX_LINE_BYTES, what="an invite")
        if data is None:
            fail("this is neither an invite (swarm1… or swarm2…) nor a file with one; paste the whole line", 2)
        text = data.decode(errors="replace")
    if not looks_like_invite(text):
        fail("this file holds no invite (swarm1… or swarm2…); your own .swarm file needs no `join`", 2)
    return text.strip()


def _line(*, ask: bool) -> str:
    """Return the next line, from the prompt or standard input. The command itself is skipped, since `host` prints it before the
    invite and both may be pasted."""
    while True:
        line = ask_for("Invite") if ask else read_line()
        if line.split() != ["swarmnode", "join"]:
            return line


def _terms(invite: Any) -> dict[str, Any]:
    """Return the terms of an invite; that of an open swarm grants every role to everyone. Ends the command if the invite admits no
    one. Raises NotAdmitted if it has expired."""
    from swarmnode.errors import NotAdmitted
    from swarmnode.swarm.records.invite import OwnedInvite

    terms = {"swarm": invite.swarm_id.hex(), "private": False, "role": "volunteer", "expires_at": None, "uses": None}
    if not isinstance(invite, OwnedInvite) or not invite.private:
        return terms
    if not invite.grant:
        fail(f"this line leads to {invite.name} but admits no one; ask its owner for an invite of your own", 2)
    grant = invite.opened_grant()
    if 0 < grant.expires_at <= time.time():
        expired = datetime.fromtimestamp(grant.expires_at)
        raise NotAdmitted(
            f"the invite to {invite.name} expired at {expired:%Y-%m-%d %H:%M}; ask its owner for a new one"
        )
    return {
        **terms,
        "private": True,
        "role": grant.allows.name.lower(),
        "expires_at": grant.expires_at or None,
        "uses": grant.uses or None,
    }


def _say(terms: dict[str, Any]) -> str:
    if not terms["private"]:
        return "open to everyone, to lend and to use"
    from swarmnode.cli.host.members import end

    life = f"until {end(terms['expires_at'])}" if terms["expires_at"] else "for ever"
    uses = f", for {counted(terms['uses'], 'machine')} in all" if terms["uses"] else ""
    return f"a private swarm; you are invited as {terms['role']} {life}{uses}"
