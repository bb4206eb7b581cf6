"""A local user of the machine reads the page's owner token in the log of a service."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from attack import Outcome, main

from swarmnode.gateway.gateway_address import GatewayAddress

VIRTUAL, FAST = True, True
TOKEN = "a-token-of-the-owner"


def journal() -> str:
    """Return the text that a starting service writes to its log."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with log.open("w") as stream, contextlib.redirect_stdout(stream):
            GatewayAddress(Path(folder), 1)._tell(1, TOKEN, ["tiny"])
        return log.read_text()


async def attack() -> Outcome:
    written = journal()
    told = "with" if TOKEN in written else "without"
    return Outcome(bool(written) and TOKEN not in written, f"{len(written)} characters logged, {told} the token")


main(__name__, attack, virtual=VIRTUAL)
