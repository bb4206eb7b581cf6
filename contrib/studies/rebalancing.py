"""SWARM (arXiv 2301.11913): how near the optimum a swarm stays under preemptions, with and without rebalancing. Prints JSON.

    python contrib/studies/rebalancing.py [--hours 32] [--peers 32] [--seed 0] [--costs 1 30 300 1200]

They replay 32 hours of preemptible T4s and report 95.8 % of the optimal throughput with rebalancing every 300 s and 82.7 % without.
Their trace is not published; here a seeded one has its features: the number of cards that the cloud has to give drifts (a random
walk between a half and all), cards are taken in bursts, and given back one by one. Every card holds 4 of 16 units; to load them,
when it comes or moves, takes each of `--costs` seconds, without serving. `share` is the time's mean of the throughput of
those that serve (`plan/spans/flow.py`), relative to the most that any placement of all present cards, loading ones
included, could do.

Rules: `ours` is what live nodes do; `theirs` is SWARM's, in the same world: four fixed stages, newcomers join the one with the
longest queues, and every 300 (or 60) s one peer of the stage with the shortest queues goes to the one with the longest. Where all
cards are alike queues are the longest where fewest peers are. In their favour a move that would only swap two stages is left out,
and a stage without holders is filled at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from shapes import even_network, transformer

from swarmnode.compute.capacity.capacity import limit_bytes_for
from swarmnode.plan.spans.flow import bound
from swarmnode.plan.spans.span_placement import Joiner, choose_span
from swarmnode.plan.view import Span, View
from swarmnode.simulate.environment.peers import Change, Peer
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import ServeSettings, Settings, SwarmSettings
from swarmnode.simulate.simulation import Simulation
from swarmnode.swarm.records.announcement import State

LAYERS, UNITS_EACH = 16, 4
STAGES = tuple(Span(start, start + UNITS_EACH) for start in range(0, LAYERS, UNITS_EACH))
LOOK_S = 60.0
PERIODS_S = (300.0, 60.0)  # of SWARM's rule
Choose = Callable[[View, Joiner], Span]
MODEL = transformer("16 layers of 1024", LAYERS, 1024)


def preemptions(peers: int, hours: float, seed: int) -> list[Change]:
    """Return changes of a cloud whose room changes every ten minutes: cards above it are taken at once, missing ones come one by
    one."""
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

    @property
    def has_learnt(self) -> bool:
        """False: the simulated peers serve, and nothing is learnt."""
        return False

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
    """Return a rule of newcomers that take a random span, needed or not."""

    def choose(_: View, joiner: Joiner) -> Span:
        start = chance.randrange(0, LAYERS, joiner.capacity_units)
        return Span(start, start + joiner.capacity_units)

    return choose


def longest_queues(view: View, _: Joiner) -> Span:
    """Return the stage with the fewest peers, which a newcomer of SWARM joins."""
    held = Counter(peer.span for peer in view.peers)
    return min(STAGES, key=lambda stage: held[stage])


def rebalance_stages(world: World, period_s: float) -> None:
    """Apply SWARM's rule of rebalancing once in every period."""
    ready: dict[Span, list[Peer]] = {stage: [] for stage in STAGES}
    for peer in world.by_id.values():
        if peer.state is State.READY:
            ready[peer.span].append(peer)
    bound_for = Counter(peer.span for peer in world.by_id.values())  # those that load count where they will be
    crowded, lacking = max(STAGES, key=bound_for.__getitem__), min(STAGES, key=bound_for.__getitem__)
    if bound_for[crowded] > bound_for[lacking] + 1 and ready[crowded]:
        world.move(ready[crowded][0], lacking)
    world.clock.after(period_s, lambda: rebalance_stages(world, period_s))


@dataclass(frozen=True)
class Rule:
    """Choice of newcomers, and moves of peers: as live nodes move (`moves`), or as SWARM's do every `period_s` seconds (0:
    never)."""

    choose: Choose = choose_span
    moves: bool = False
    period_s: float = 0.0


def study(peers: int, hours: float, seed: int, rule: Rule, cost_s: float) -> dict[str, float]:
    """Simulate one trace: the mean share of the best throughput, that of the worst hour, and counts of moves and
    preemptions."""
    need_bytes = MODEL.serving_sizes.need_bytes(0, UNITS_EACH, 0)
    scenario = dataclasses.replace(
        even_network("T4", peers, delay_s=0.001, bandwidth_bps=1e12),
        memory_bytes=(limit_bytes_for(need_bytes),) * peers,
    )
    swarm = SwarmSettings(rebalance=rule.moves, cache_tokens=0, load_bytes_per_s=need_bytes / cost_s)
    settings = Settings(hours=hours, sample_s=600.0, serve=ServeSettings(), swarm=swarm)
    simulation = Simulation(scenario, MODEL, settings, trace=preemptions(peers, hours, seed))
    world = simulation.world
    world.choose = rule.choose
    if rule.period_s:
        world.clock.after(rule.period_s, lambda: rebalance_stages(world, rule.period_s))
    standing = Standing(world)
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
    parser.add_argument(
        "--costs", type=float, nargs="+", default=[1.0, 30.0, 300.0, 1200.0], help="seconds of loading a span"
    )
    a = parser.parse_args()
    rules = {
        "ours": Rule(moves=True),
        **{f"theirs, every {period_s:.0f} s": Rule(longest_queues, period_s=period_s) for period_s in PERIODS_S},
        "newcomers choose, nobody moves": Rule(),
        "newcomers join the longest queues, nobody moves": Rule(longest_queues),
        "newcomers go anywhere, nobody moves": Rule(anywhere(random.Random(a.seed))),
    }
    results = {
        f"{cost_s:g} s": {name: study(a.peers, a.hours, a.seed, rule, cost_s) for name, rule in rules.items()}
        for cost_s in a.costs
    }
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
