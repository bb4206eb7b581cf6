"""Command `swarmnode join`: remember a swarm under its name."""

from __future__ import annotations

import shlex
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from swarmnode.cli.options.option import argument, option
from swarmnode.cli.terminal.console import HOME, JSON, command, fail, print_json, say
from swarmnode.cli.terminal.standard_input import MAX_LINE_BYTES, STANDARD_INPUT, is_piped, read_line
from swarmnode.counting import counted


@command
def join(
    invite: str = argument(
        "",
        "The invite that you received, a file with it, or - for standard input; default: ask for it.",
        metavar="[INVITE]",
    ),
    name: str = option("", "Remember the swarm under this name; default: its own."),
    home: Path = HOME,
    as_json: bool = JSON,
) -> None:
    """Remember a swarm under its name.

    Then `swarmnode run NAME`, `generate NAME` and `status NAME` work everywhere.

    Example: swarmnode join swarm1…
    """
    from swarmnode.swarm.records.invite import decode_invite
    from swarmnode.swarm.storage.named_swarms import JoinedSwarms

    text = _invite(invite)
    terms = _terms(decode_invite(text))
    joined = JoinedSwarms(home)
    known_as = joined.remember(text, name)
    joined.used(known_as)
    if as_json:
        print_json({"name": known_as, **terms})
        return
    say(f"Joined {known_as}: {_say(terms)}.")
    quoted = shlex.quote(known_as)
    if terms["role"] != "client":
        say(f"Lend this machine:  swarmnode run {quoted}")
    say(f'Use it:             swarmnode generate {quoted} "Once upon a time"')


def _invite(text: str) -> str:
    """Return the invite: the argument itself, or the line in a file, on standard input or from the prompt. Ends the command if
    there is none."""
    from swarmnode.swarm.records.invite import looks_like_invite
    from swarmnode.swarm.storage.user_file import read_user_file

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
        line = str(typer.prompt("Invite", err=True)) if ask else read_line()
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
