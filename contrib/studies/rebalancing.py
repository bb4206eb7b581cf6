"""SWARM (arXiv 2301.11913): how near the optimum a swarm stays under preemptions, with and without rebalancing. Prints JSON.

    python contrib/studies/rebalancing.py [--hours 32] [--peers 32] [--seed 0]

They replay 32 hours of preemptible T4s and report 95.8 % of the optimal throughput with rebalancing every 300 s and 82.7 % without.
Their trace is not published; here a seeded one has its features: the number of cards that the cloud has to give drifts (a random
walk between a half and all), cards are taken in bursts, and given back one by one. Every card holds 4 of 16 units, and its state
is small enough to move in 30 s. `share` is the time's mean of the throughput of those that serve
(`plan/spans/flow.py`), relative to the
most that any placement of all cards that are there, loading ones included, could do.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections.abc import Callable

from shapes import even_network, transformer

from swarmnode.compute.memory import limit_bytes_for
from swarmnode.plan.spans.flow import bound
from swarmnode.plan.spans.placement import Joiner, choose_span
from swarmnode.plan.view import Span, View
from swarmnode.simulate.environment.churn import Change
from swarmnode.simulate.environment.peers import Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings
from swarmnode.simulate.simulation import Simulation

LAYERS, UNITS_EACH = 16, 4
LOOK_S = 60.0
Choose = Callable[[View, Joiner], Span]
MODEL = transformer("16 layers of 1024", LAYERS, 1024)


def preemptions(peers: int, hours: float, seed: int) -> list[Change]:
    """Every ten minutes the cloud has other room: above it cards are taken at once, below it they come one by one."""
    chance = random.Random(seed)
    up, down, changes = set(range(peers)), set[int](), list[Change]()
    room = 0.85 * peers
    now_s = 0.0
    while now_s < hours * 3600:
        now_s += 600.0
        room = min(peers, max(peers / 2, room + chance.gauss(0, peers / 12)))
        at_s = now_s + chance.uniform(0, 300)
        taken = chance.sample(sorted(up), max(0, len(up) - int(room)) + (chance.random() < 0.3))
        changes += [Change(at_s + chance.uniform(0, 20), device, False) for device in taken]
        up -= set(taken)
        down |= set(taken)
        given = chance.sample(sorted(down - set(taken)), min(len(down - set(taken)), max(0, int(room) - len(up))))
        changes += [Change(at_s + chance.uniform(20, 280), device, True) for device in given]
        up |= set(given)
        down -= set(given)
    return sorted(change for change in changes if change.at_s < hours * 3600)


class Standing:
    """A workload that does nothing but ask, now and then, how well the peers stand."""

    def __init__(self, world: World) -> None:
        self.shares: list[float] = []
        self._world = world

    def begin(self) -> None:
        self._world.clock.after(LOOK_S, self._look)

    def gauges(self) -> dict[str, float]:
        return {}

    def ready(self, peer: Peer) -> None: ...

    def leaving(self, peer: Peer) -> None: ...

    def lost(self, peer: Peer) -> None: ...

    def _look(self) -> None:
        world = self._world
        alive = ((peer.capacity_units, peer.device.decode_units_per_s) for peer in world.by_id.values())
        best = bound(world.model.units, alive)
        self.shares.append(world.throughput() / best if best else 0.0)
        world.clock.after(LOOK_S, self._look)


def anywhere(chance: random.Random) -> Choose:
    """A newcomer that does not look where it is needed."""

    def choose(_: View, joiner: Joiner) -> Span:
        start = chance.randrange(0, LAYERS, joiner.capacity_units)
        return Span(start, start + joiner.capacity_units)

    return choose


def study(peers: int, hours: float, seed: int, *, rebalance: bool, choose: Choose = choose_span) -> dict[str, float]:
    """One trace."""
    scenario = dataclasses.replace(
        even_network("T4", peers, delay_s=0.001, bandwidth_bps=1e10),
        memory_bytes=(limit_bytes_for(MODEL.serving_sizes.need_bytes(0, UNITS_EACH, 0)),) * peers,
    )
    swarm = SwarmSettings(rebalance=rebalance, cache_tokens=0)
    settings = Settings(hours=hours, sample_s=600.0, serve=ServeSettings(), swarm=swarm)
    simulation = Simulation(scenario, MODEL, settings, trace=preemptions(peers, hours, seed))
    simulation.world.choose = choose
    standing = Standing(simulation.world)
    simulation.run(workload=standing)
    totals = simulation.measures.totals
    return {
        "share": statistics.mean(standing.shares),
        "worst hour": min(statistics.mean(standing.shares[at : at + 60]) for at in range(0, len(standing.shares), 60)),
        "moves": totals["moves"],
        "preemptions": totals["peers lost"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--hours", type=float, default=32.0)
    parser.add_argument("--peers", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    results = {
        "with rebalancing": study(a.peers, a.hours, a.seed, rebalance=True),
        "newcomers choose, nobody moves": study(a.peers, a.hours, a.seed, rebalance=False),
        "newcomers go anywhere, nobody moves": study(
            a.peers, a.hours, a.seed, rebalance=False, choose=anywhere(random.Random(a.seed))
        ),
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
