"""A hop or a stranger opens adapters under the id of another owner's, to feed, stall or read the adapter behind it."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

from attack import Outcome, main

from swarmnode.codec.tuning_messages import (
    Gather,
    GetAdapter,
    JoinAdapter,
    OpenAdapter,
    TuneGradient,
    TuneInput,
    Update,
)
from swarmnode.compress.codecs import encode_values
from swarmnode.errors import PeerError
from swarmnode.tuning.client.tuned_route import TunedRoute
from tests.training.scene import Talk
from tests.tuning.hops import IDS, Hops, hops_of, loss_of

VIRTUAL, FAST = True, True
VICTIM, THIEF = 0, 1
WAYS = ("feeds through the first hop", "waits at the last hop", "joins by itself", "opens its own route")
BEFORE, OPENED, BETWEEN = "before the victim opens", "before its first microbatch", "between its microbatches"
KNOWN = len(JoinAdapter.__struct_fields__)


async def steal(scene: Hops, way: str, request: OpenAdapter) -> TunedRoute | None:
    """Do what the thief does, which knows the victim's id, epoch and route. Returns the route that it has opened."""
    first, last, own = scene.peers
    if way.startswith("joins"):
        infos, payload = encode_values((IDS,))
        for peer in (first, last):
            for epoch in range(3):
                for owner in ("", scene.others[VICTIM], scene.others[THIEF], first):
                    talk = await Talk.begin(scene.boards[THIEF], peer)
                    talk.send(JoinAdapter(*(request.adapter, epoch, owner)[:KNOWN]))
                    with suppress(PeerError):
                        talk.send(TuneInput(0, 2, infos), payload)
                        talk.send(TuneGradient(0, 2, (True,), infos), payload)
                        for command in (Gather(0), Update(0, 1.0, 1.0), GetAdapter(0)):
                            talk.send(command)
        await asyncio.sleep(1.0)
        return None
    peers = [own, last] if way.startswith("opens") else [first, last]
    route = await scene.open(THIEF, scene.opening(peers, request.adapter))
    if not way.startswith("waits"):
        feeding = asyncio.ensure_future(loss_of(route, 3))
        await asyncio.wait([feeding], timeout=5.0)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    return route


async def step_of(scene: Hops, request: OpenAdapter, way: str, when: str) -> list[float]:
    """Return the losses of the victim's two microbatches, and the norm of their gradient."""
    stolen = await steal(scene, way, request) if when == BEFORE else None
    victim = await scene.open(VICTIM, request)
    try:
        stolen = await steal(scene, way, request) if when == OPENED else stolen
        losses = [await loss_of(victim, 0)]
        stolen = await steal(scene, way, request) if when == BETWEEN else stolen
        losses.append(await loss_of(victim, 1))
        return [*losses, await victim._gather(0, (0, 1))]
    finally:
        await victim.close()
        if stolen is not None:
            await stolen.close()


async def attack() -> Outcome:
    found, ways = [], [(way, when) for way in WAYS for when in (BEFORE, OPENED, BETWEEN)]
    with tempfile.TemporaryDirectory() as folder:
        async with hops_of(Path(folder), hops=3, others=2) as scene:
            first, last, _own = scene.peers
            wanted = await step_of(scene, scene.opening([first, last]), "", "")
            for number, (way, when) in enumerate(ways, 1):
                try:
                    got = await step_of(scene, scene.opening([first, last], bytes([number] * 16)), way, when)
                    found += [] if got == wanted else [f"{way} {when}: {got} instead of {wanted}"]
                except PeerError as error:
                    found.append(f"{way} {when}: {error}")
    return Outcome(not found, "; ".join(found) or f"{len(ways)} ways, and the victim's losses are its own")


main(__name__, attack, virtual=VIRTUAL)
