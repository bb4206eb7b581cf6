"""`swarmnode id`: who this machine is to others."""

from __future__ import annotations

from pathlib import Path

from swarmnode.cli.options.option import option
from swarmnode.cli.terminal.console import HOME, command, say


@command
def show_identity(
    client: bool = option(False, "The id of this machine's clients (generate, status, train)."), home: Path = HOME
) -> None:
    """Print this machine's peer id, for an invite that is for it alone (`swarmnode invite --peer`).

    Example: swarmnode id
    """
    from swarmnode.net.identity import Identity

    role = "client" if client else "node"
    say(Identity.load_or_create(home / f"{role}.key").peer_id)
