"""`swarmnode revoke`: a membership, or an invite with all memberships by it, ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

from swarmnode.cli.options.option import argument
from swarmnode.cli.options.owner import OwnerOptions
from swarmnode.cli.options.swarm import SWARM_FILE, swarm_file
from swarmnode.cli.terminal.console import HOME, JSON, Verbosity, command, print_json, run_async, say
from swarmnode.counting import counted


@command
def revoke(
    *,
    swarm: str = SWARM_FILE,
    who: str = argument(
        ..., "A peer's id, its end or its name, or an invite or the beginning of its id.", metavar="PEER|INVITE"
    ),
    owner: OwnerOptions,
    home: Path = HOME,
    as_json: bool = JSON,
    logs: Verbosity,
) -> None:
    """End a membership: within a minute nobody speaks with the peer any more, and its links are cut, though you go offline.

    A peer that is revoked may come back as another one while its invite has uses left: revoke the invite too.

    Example: swarmnode revoke friends.swarm 5TqWZRpY
    """
    logs.begin()
    from swarmnode.client.owner_client import OwnerClient, end_membership, find_member
    from swarmnode.errors import NetworkDown
    from swarmnode.roles.membership.owner import find_invite
    from swarmnode.swarm.storage.issued_invites import issued_invites_path, open_issued_invites
    from swarmnode.swarm.storage.swarmfile import load_swarm

    file = swarm_file(swarm)
    loaded = load_swarm(file)
    book = open_issued_invites(issued_invites_path(file))
    key = owner.key_of(file)
    invite = find_invite(who, loaded, book)

    async def carry_out(_stop: asyncio.Event) -> tuple[str | None, int]:
        try:
            owner_client = await OwnerClient.join(loaded, home)
        except NetworkDown:
            owner_client = None
        try:
            peer = None if invite else find_member(who, loaded, book, owner_client)
            return peer, await end_membership(loaded, key, book, owner_client, peer=peer, invite=invite)
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
