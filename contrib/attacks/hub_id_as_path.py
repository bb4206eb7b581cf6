"""A manifest's hub id or revision is a path, so that others read a file of their own, or another part of the hub."""

from __future__ import annotations

import msgspec
from attack import Outcome, main

from swarmnode.errors import ProtocolError
from swarmnode.swarm.records.manifest import ModelInfo, decode_manifest
from tests.swarm.records.test_manifest import NO_HUB_IDS, make_manifest

VIRTUAL, FAST = True, True


def is_taken(model: ModelInfo) -> bool:
    try:
        decode_manifest(msgspec.msgpack.encode(make_manifest(model=model)))
    except ProtocolError:
        return False
    return True


async def attack() -> Outcome:
    models = [ModelInfo("llama", units=6, hidden=64, hub_id=path) for path in NO_HUB_IDS]
    models += [
        ModelInfo("llama", units=6, hidden=64, hub_id="o/m", revision=path) for path in ("../x", "/etc", "a/../b")
    ]
    taken = sum(map(is_taken, models))
    return Outcome(not taken, f"{taken} of {len(models)} paths were taken for models")


main(__name__, attack, virtual=VIRTUAL)
