"""A model's text and a peer's name clear the terminal, set its title, overwrite lines, or reverse the text direction."""

from __future__ import annotations

import contextlib
import io

from attack import Outcome, main

from swarmnode.cli.use.status import status_table
from swarmnode.terminal.console import print_json, say
from swarmnode.terminal.tables import show

VIRTUAL, FAST = True, True
ESCAPES = (
    "\x1b[2J",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x08\x08",
    "\r",
    "\x7f",
    "\u202e",
    "\u2066",
    "[link=file:///]x[/link]",
    "[/]",  # not a tag that closes one: it ended `status` with an error
)


def obeyed(text: str) -> set[str]:
    """Return the characters of `text` that a terminal would obey; empty if there are none."""
    return {one for one in text if one != "\n" and (ord(one) < 32 or 127 <= ord(one) < 160 or one in "\u202e\u2066")}


def printed(escape: str) -> str:
    """Return the output of the commands for a text, a status as JSON and a status table, all with `escape` in them."""
    peer = {"peer": "Q", "name": escape, "state": "ready", "device": escape, "span": [0, 2], "sessions": 0}
    peer |= {"reached": "unknown", "sends": {}, "draft_model": escape}
    status = {"name": escape, "units": 2, "mode": "serve", "adapters": [escape], "missing": [], "peers": [peer]}
    with contextlib.redirect_stdout(io.StringIO()) as terminal:
        say(f"before{escape}after")
        print_json(status)
        show(status_table(status))
    return terminal.getvalue()


async def attack() -> Outcome:
    passed = [escape for escape in ESCAPES if obeyed(printed(escape))]
    return Outcome(not passed, f"{len(ESCAPES) - len(passed)} of {len(ESCAPES)} escapes printed as text")


main(__name__, attack, virtual=VIRTUAL)
