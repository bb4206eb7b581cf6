"""An invite's bootstrap address sets the terminal's title and clears it when an error prints the address of an unreachable peer."""

from __future__ import annotations

import msgspec
from attack import Outcome, main

from swarmnode.errors import UsageError
from swarmnode.swarm.records.invite import decode_invite, encode_invite
from tests.swarm.records.test_owned_invite import PUBLIC

VIRTUAL, FAST = True, True
ESCAPES = ("\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\r", "\u202e")


def is_taken(escape: str) -> bool:
    try:
        decode_invite(encode_invite(msgspec.structs.replace(PUBLIC, bootstraps=(f"/ip4/203.0.113.7{escape}/tcp/1",))))
    except UsageError:
        return False
    return True


async def attack() -> Outcome:
    taken = sum(map(is_taken, ESCAPES))
    return Outcome(not taken, f"{taken} of {len(ESCAPES)} invites with such an address were taken")


main(__name__, attack, virtual=VIRTUAL)
