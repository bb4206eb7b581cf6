"""`swarmnode revoke`: a membership, or an invite with all memberships by it, ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from swarmnode.cli.options.owner import OWNER_KEY, PASSWORD_FILE, owner_key_of
from swarmnode.cli.options.swarm import SWARM_FILE, swarm_file
from swarmnode.cli.terminal.console import (
    HOME,
    JSON,
    VERBOSE,
    default_home,
    print_json,
    reports_errors,
    run_async,
    say,
    set_up_logging,
)
from swarmnode.counting import counted


@reports_errors
def revoke(
    swarm: str = SWARM_FILE,
    who: str = typer.Argument(
        ..., metavar="PEER|INVITE", help="A peer's id, its end or its name, or an invite or the beginning of its id."
    ),
    owner_key: Path = OWNER_KEY,
    password_file: Path = PASSWORD_FILE,
    home: Path = HOME,
    as_json: bool = JSON,
    verbose: bool = VERBOSE,
) -> None:
    """End a membership: within a minute nobody speaks with the peer any more, and its links are cut, though you go offline.

    A peer that is revoked may come back as another one while its invite has uses left: revoke the invite too.

    Example: swarmnode revoke friends.swarm 5TqWZRpY
    """
    set_up_logging(verbose)
    from swarmnode.client.owner_client import OwnerClient, end_membership, find_member
    from swarmnode.errors import NetworkDown
    from swarmnode.roles.membership.owner import find_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    file = swarm_file(swarm)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    owner = owner_key_of(file, owner_key, password_file)
    invite = find_invite(who, loaded, book)

    async def carry_out(_stop: asyncio.Event) -> tuple[str | None, int]:
        try:
            owner_client = await OwnerClient.join(loaded, default_home(home))
        except NetworkDown:
            owner_client = None
        try:
            peer = None if invite else find_member(who, loaded, book, owner_client)
            return peer, await end_membership(loaded, owner, book, owner_client, peer=peer, invite=invite)
        finally:
            if owner_client is not None:
                await owner_client.close()

    peer, told = run_async(carry_out)
    if as_json:
        print_json({"peer": peer, "invite": invite.hex() if invite else None, "told": told})
    elif told:
        say(
            f"Revoked {peer or 'invite ' + (invite or b'').hex()}: {counted(told, 'peer')} heard it, and others will from them."
        )
    else:
        say(f"Revoked, and kept in {book.path}; nobody is online. It spreads when a node of yours runs with {swarm}.")
