"""Thirty identities of one /24 claim to be ten thousand times as fast as others, to become all hops of a route."""

from __future__ import annotations

from attack import Outcome, main

from swarmnode.plan.routes.routing import find_route
from swarmnode.plan.view import PeerView, Span, View

VIRTUAL, FAST = True, True
UNITS, STAGES, SYBILS = 12, 6, 30
SYBIL_NETWORK = "203.0.113.0/24"


def peers(name: str, count: int, speed: float, group: str) -> list[PeerView]:
    """Return `count` peers that hold the stages in turn. `group` is the address group, a format string for the peer's number."""
    size = UNITS // STAGES
    spans = [Span(number % STAGES * size, (number % STAGES + 1) * size) for number in range(count)]
    return [
        PeerView(f"{name} {number}", span, decode_units_per_s=speed, group=group.format(number))
        for number, span in enumerate(spans)
    ]


async def attack() -> Outcome:
    sybils = peers("sybil", SYBILS, 1e6, SYBIL_NETWORK)
    honest = peers("honest", 2 * STAGES, 100.0, "198.51.{}.0/24")
    route = find_route(View(UNITS, (*sybils, *honest)), client="client")
    taken = sum(hop.peer.startswith("sybil") for hop in route.hops)
    return Outcome(taken <= 1, f"{taken} of {len(route.hops)} hops are of the {SYBILS} identities")


main(__name__, attack, virtual=VIRTUAL)
