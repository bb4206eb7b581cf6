"""A ticket of `tune --share` or a `.swarm` file sets the terminal's title when an error prints an address or a peer of it."""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path

import msgspec
from attack import Outcome, main

from swarmnode.errors import UsageError
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.swarmfile import load_swarm
from swarmnode.tuning.client.follower import Ticket
from tests.swarm.records.test_manifest import make_manifest

VIRTUAL, FAST = True, True
ESCAPES = ("\x1b]0;title\x07", "\x1b[2J", "\x9b31m", "\r", "\u202e")
TICKET = Ticket(bytes(32), "12D3KooWleader", ("/ip4/203.0.113.7/tcp/1",), bytes(16), bytes(16))


def is_taken(ticket: Ticket) -> bool:
    try:
        Ticket.read(ticket.as_text())
    except UsageError:
        return False
    return True


def is_loaded(**addresses: list[str]) -> bool:
    manifest = base64.b64encode(encode_manifest(make_manifest())).decode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.swarm"
        path.write_text(json.dumps({"swarmnode": 1, "manifest": manifest, **addresses}))
        try:
            load_swarm(path)
        except UsageError:
            return False
    return True


async def attack() -> Outcome:
    assert is_taken(TICKET) and is_loaded(bootstraps=["/ip4/203.0.113.7/tcp/1"])
    taken = 0
    for escape in ESCAPES:
        address = f"/ip4/203.0.113.7{escape}/tcp/1"
        taken += is_taken(msgspec.structs.replace(TICKET, leader=f"12D3{escape}"))
        taken += is_taken(msgspec.structs.replace(TICKET, addresses=(address,)))
        taken += is_loaded(bootstraps=[address]) + is_loaded(bootstrap_listen=[address])
    return Outcome(not taken, f"{taken} of {4 * len(ESCAPES)} tickets and files with such texts were taken")


main(__name__, attack, virtual=VIRTUAL)
