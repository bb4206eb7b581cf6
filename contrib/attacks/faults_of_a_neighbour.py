"""A hop of a tuning accuses honest neighbours or the request by faults, or sends numbers that overflow there, to end the tuning."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

from attack import Outcome, main

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Fault
from swarmnode.codec.tuning_messages import TuneInput
from swarmnode.errors import ErrorCode, NetworkDown, NoRoute, PeerError, SwarmnodeError
from swarmnode.plan.routes.routing import SessionSize
from swarmnode.tuning.adapter_parts import HopPassage
from swarmnode.tuning.client.route_opener import AdapterRequest, SwarmRoutes
from swarmnode.tuning.client.state_shapes import StateShapes
from swarmnode.tuning.client.tuned_route import TunedMicrobatch
from swarmnode.tuning.held_adapter import HeldAdapter
from tests.tuning.hops import IDS, RECIPE, UNITS, Hops, hops_of

VIRTUAL, FAST = True, True
CODES = (ErrorCode.NOT_FINITE, ErrorCode.INVALID_REQUEST, ErrorCode.PEER_LOST)


class ToyRouter:
    """Router over hops that hold half of the model each: `columns` are the holders of each half, the fastest first."""

    def __init__(self, columns: Sequence[Sequence[str]]) -> None:
        self.columns = columns
        self.suspected: list[str] = []

    def route(self, avoid: frozenset[str], _keep: Sequence[HopSpec], _size: SessionSize) -> tuple[HopSpec, ...]:
        for peers in product(*self.columns):
            if not avoid & set(peers):
                size = UNITS // len(peers)
                return tuple(HopSpec(peer, place * size, (place + 1) * size) for place, peer in enumerate(peers))
        raise NoRoute("some layers have no holder")

    def suspect(self, peer: str, _reason: str) -> None:
        self.suspected.append(peer)

    async def changed(self) -> None:
        await asyncio.Event().wait()


@contextmanager
def lying(liar: str, *, code: ErrorCode | None, about: int = 0) -> Iterator[None]:
    """Have the hop `liar` report a fault of the hop `about` places from it, or, without a code, send numbers of 1e30."""
    enter, forward, backward = HeldAdapter._enter, HopPassage.encoded, HopPassage.encoded_gradients

    def accuse(self: HeldAdapter, body: TuneInput, payload: object) -> None:
        if code is None or self.hop.peer != liar:
            enter(self, body, payload)  # type: ignore[arg-type]
        else:
            self.end(Fault(self.opened.epoch, max(0, self.opened.index + about), code))

    def enlarge(self: HopPassage, values: tuple) -> tuple:  # type: ignore[type-arg]
        large = code is None and self.held.hop.peer == liar
        return tuple(one if one is None or not large else one.sign() * 1e30 for one in values)

    with (
        patch.object(HeldAdapter, "_enter", accuse),
        patch.object(HopPassage, "encoded", lambda self, values: forward(self, enlarge(self, values))),
        patch.object(HopPassage, "encoded_gradients", lambda self, values: backward(self, enlarge(self, values))),
    ):
        yield


async def tune(scene: Hops, columns: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """Return how a tuning of one step ends, and the peers that its owner suspects."""
    router, clock = ToyRouter(columns), asyncio.get_running_loop().time
    request = AdapterRequest(RECIPE, rows=2, positions=8, window=2)
    shapes = StateShapes({unit: {} for unit in range(UNITS)})
    routes = SwarmRoutes(
        scene.boards[0],
        router,  # type: ignore[arg-type]
        request,
        shapes,
        cannot_tune=tuple,
        on_waiting=lambda _why, _missing: None,
        clock=clock,
        patience_s=60.0,
    )
    for _ in range(20):
        route = None
        try:
            route = await routes.open(None)
            await route.gradient(0, [TunedMicrobatch(0, (IDS,), (IDS,), 1 / 14)])
            routes.succeeded()
            return "trained", router.suspected
        except (PeerError, NetworkDown) as error:
            try:
                routes.failed(error)
            except SwarmnodeError as end:
                return f"{type(end).__name__}: {end}", router.suspected
        except NoRoute as end:
            return f"NoRoute: {end}", router.suspected
        finally:
            if route is not None:
                await route.close()
    return "tried for ever", router.suspected


async def attack() -> Outcome:
    said, tries = [], 0
    with tempfile.TemporaryDirectory() as folder:
        async with hops_of(Path(folder), hops=4, others=1) as scene:
            a1, b1, a2, b2 = scene.peers
            for columns in (((a1, a2), (b1, b2)), ((a1,), (b1, b2))):
                for liar, about in ((a1, 1), (a1, 0), (b1, -1)):
                    is_spare = len(next(column for column in columns if liar in column)) > 1
                    for code in (*CODES, *((None,) if about in (1, -1) else ())):
                        tries += 1
                        with lying(liar, code=code, about=about):
                            end, suspected = await tune(scene, columns)
                        honest = set(suspected) - {liar}
                        fair = end == "trained" if is_spare else end == "trained" or "too few machines" in end
                        if not fair or honest:
                            said.append(f"{code and code.name} {about} of {liar[-4:]}: {end}, {len(honest)} suspected")
    return Outcome(not said, "; ".join(said) or f"{tries} tries of one hop, and none ended a tuning that can go on")


main(__name__, attack, virtual=VIRTUAL)
