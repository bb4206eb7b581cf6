"""A result in numbers: what `swarmnode simulate --json` prints."""

from __future__ import annotations

from typing import Any

from swarmnode.simulate.results.measures import PERCENTILES, percentile
from swarmnode.simulate.simulation import SimulationResult

BUSIEST = 20  # links that are listed


def summary(result: SimulationResult) -> dict[str, Any]:
    """Everything but the decisions' own times is the same for the same settings, bit for bit."""
    settings, measures = result.settings, result.measures
    return {
        "scenario": result.scenario.name,
        "model": result.model.name,
        "workload": settings.workload,
        "seed": settings.seed,
        "seconds": settings.seconds,
        "peers": len(result.world.peers),
        "churn_per_hour": settings.churn,
        "events": result.events,
        **_rates(result),
        "totals": dict(sorted(measures.totals.items())),
        "latencies": {name: _spread(values) for name, values in sorted(measures.values.items())},
        "utilisation": result.world.utilisation(),
        "links": _links(result),
        "bytes": sum(result.world.links.bytes_sent.values()),
        "curves": {"seconds": measures.times_s, **measures.curves},
        "decisions": {name: _spread(values) for name, values in sorted(measures.decision_s.items())},
    }


def _rates(result: SimulationResult) -> dict[str, float]:
    counted = result.model.counted
    name = counted if result.settings.workload == "serve" else f"{counted} trained"
    return {f"{counted}_per_s": result.measures.totals.get(name, 0.0) / result.settings.seconds}


def _spread(values: list[float]) -> dict[str, float]:
    spread = {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}
    return {"count": len(values), "mean": sum(values) / len(values), **spread, "max": max(values)}


def _links(result: SimulationResult) -> list[dict[str, Any]]:
    """Those that carried most, between places of the scenario."""
    places = result.world.links.places
    carried: dict[tuple[int, int], float] = {}
    for (sender, receiver), size_bytes in result.world.links.bytes_sent.items():
        link = places[sender], places[receiver]
        carried[link] = carried.get(link, 0.0) + size_bytes
    busiest = sorted(carried.items(), key=lambda item: (-item[1], item[0]))[:BUSIEST]
    return [{"from": sender, "to": receiver, "bytes": size_bytes} for (sender, receiver), size_bytes in busiest]
