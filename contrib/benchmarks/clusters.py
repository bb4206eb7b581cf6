"""Two clusters of four that a slow link joins, and a ninth peer: steps of peers that organise themselves, beside the best that
can be laid by hand. Prints JSON.

    python contrib/benchmarks/clusters.py [--runs activations gradients usual] [--ninth none near far stranger liar half]
        [--seeds 3] [--gb 16] [--mbps 500 100]

Places are chosen by the rule and from the announcements of live nodes (`training/organisation.py`), the step is simulated.
`known`: the rule knows the run; `usual`: it takes a usual step for it, as nodes do before a trainer comes. The ninth stands in
the first cluster (`near`), or behind slow links to all peers (`far`). There it may be unmeasured and claim nothing
(`stranger`), claim round trips of 0 to all (`liar`), or of half the slow link's (`half`). Devices come in as many orders as there
are seeds.

`best`: the least step, longer where units have one holder, as peers weigh it, of all arrangements by hand: stages of one size have
as many holders each, give or take one, shared out between the clusters in every way, or all in one; the ninth at any stage, or
standing by. `bare`: the least step whatever holders units have.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from organisation import GRADIENT_BYTES, UNITS, places, prepared

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.cost import HOLDERS, fragility
from swarmnode.plan.offline.planner_files import Scenario
from swarmnode.plan.spans.span_placement import PlacementRule
from swarmnode.plan.training.layout import STANDING_BY, cut
from swarmnode.plan.training.rule import SETTLING, StepOutlook, TrainingRule
from swarmnode.plan.training.step_forecast import TrainingLoad, TrainingNetwork, held_units
from swarmnode.plan.view import PeerView, Span, View
from swarmnode.simulate.environment.model import Model
from swarmnode.simulate.environment.world import World
from swarmnode.simulate.settings import Settings, TrainSettings
from swarmnode.simulate.simulation import Simulation
from swarmnode.simulate.steps.simulated_training import Training
from swarmnode.training.organisation import MICROBATCHES, POSITIONS, announced_network

SIZE = 4  # of a cluster
DELAYS_S, INSIDE_BPS = (0.001, 0.02), 5e9  # inside, and between
USUAL = TrainSettings(microbatches=MICROBATCHES, sequence=POSITIONS, compress="none")
RUNS = {  # the width of the model, and its step
    "activations": (512, TrainSettings(microbatches=112, microbatch=4, sequence=2048, compress="fp16")),
    "gradients": (2048, TrainSettings(microbatches=16, sequence=512, compress="fp16")),
    "usual": (2048, USUAL),
}
STAGES = (1, 2, 3, 4, 8)  # into which the model is cut by hand
NINTHS = ("none", "near", "far", "stranger", "liar", "half")
CLAIMS = {"liar": 0.0, "half": 0.5}  # of the slow link's round trip
STEPS = 2
LONGEST_S = 7200.0


@dataclass(frozen=True)
class Case:
    """A network, a model, and the device `unmeasured` without announced round trips, or with those that it claims itself."""

    scenario: Scenario
    model: Model
    unmeasured: int | None = None
    claimed_rtt_s: float | None = None

    def told(self, world: World, seen: Sequence[PeerView], tokens: int) -> View:
        """Return the view that announcements give: measured round trips and bandwidths, and speeds in training."""
        index_of = {world.met[peer.peer].peer: world.met[peer.peer].index for peer in seen}
        rtt_s, path_bps = dict[tuple[PeerId, PeerId], float](), dict[tuple[PeerId, PeerId], float]()
        for pair in itertools.permutations(index_of, 2):
            one, other = index_of[pair[0]], index_of[pair[1]]
            if self.unmeasured not in (one, other):
                rtt_s[pair] = 2 * world.links.delay_s(one, other)
                path_bps[pair] = world.links.bandwidth_bps(one, other)
            elif one == self.unmeasured and self.claimed_rtt_s is not None:
                rtt_s[pair], path_bps[pair] = self.claimed_rtt_s, 1e18
        peers = tuple(replace(peer, decode_units_per_s=_units_per_s(world, peer.peer, tokens)) for peer in seen)
        return View(UNITS, peers, rtt_s, path_bps=path_bps)


def _units_per_s(world: World, peer: PeerId, tokens: int) -> float:
    device = world.met[peer].device
    return tokens / (device.prompt_s(1, tokens) + device.backward_s(1, tokens))


def model_of(hidden: int) -> Model:
    """Return a model made of transformer layers of this hidden size."""
    parameters = (12 * hidden**2,) * UNITS
    return Model(f"layers of {hidden}", parameters, parameters, (4 * hidden,) * UNITS, hidden)


def case_of(ninth: str, mbps: float, hidden: int, gb: int, seed: int) -> Case:
    """Return the case of two clusters with this ninth peer; `seed` shuffles the devices."""
    sizes = [SIZE, SIZE] if ninth == "none" else [SIZE + 1, SIZE] if ninth == "near" else [SIZE, SIZE, 1]
    flat = places("two clusters", sizes, DELAYS_S, (INSIDE_BPS, 1e6 * mbps), np.full(sum(sizes), 6e13))
    scenario = prepared(flat, gb, seed)
    alone = None if ninth in ("none", "near", "far") else scenario.regions.index(f"place {len(sizes) - 1}")
    claimed_s = 2 * CLAIMS[ninth] * DELAYS_S[1] if ninth in CLAIMS else None
    return Case(scenario, model_of(hidden), alone, claimed_s)


def rule_of(case: Case, world: World, run: TrainSettings) -> TrainingRule:
    """Return the rule of live nodes, for steps of this run."""
    steps = outlook_of(case, world, run)
    return TrainingRule(steps, lambda peer: world.met[peer.peer].capacity_units, lambda: False)


def outlook_of(case: Case, world: World, run: TrainSettings) -> StepOutlook:
    """Return the forecast of live nodes for steps of `run`."""
    width_bytes = 2 if run.compress == "fp16" else 4
    gradient_bytes_U = GRADIENT_BYTES * np.array(case.model.parameters, dtype=float)
    load = TrainingLoad(
        run.microbatches,
        float(width_bytes * run.tokens * case.model.hidden),
        gradient_bytes_U,
        np.ones(UNITS),
        3 * gradient_bytes_U,
    )

    def network(_view: View, seen: Sequence[PeerView]) -> TrainingNetwork:
        view = case.told(world, seen, run.tokens)
        return announced_network(view, view.peers, run.tokens)

    return StepOutlook(lambda: load, network)


def simulated(
    case: Case, run: TrainSettings, rule: TrainSettings | None = None, spans: Sequence[Span] | None = None
) -> Any:
    """Simulate training and return the mean seconds of a step (infinity if none ends) and the spans of all peers. Spans are
    chosen by the rule for steps of `rule`, or are `spans`."""
    settings = Settings("train", hours=LONGEST_S / 3600, train=run)
    simulation = Simulation(case.scenario, case.model, settings, spans=spans)
    training = Training(simulation.world, run)
    if rule is not None:
        by_rule = rule_of(case, simulation.world, rule)
        simulation.world.follow(PlacementRule(by_rule.choose, lambda *_: None), SETTLING)
    world = simulation.world
    world.begin(training, spans)
    training.begin()
    steps_s = simulation.measures.values["step, s"]
    while len(steps_s) < STEPS and simulation.clock.now_s < LONGEST_S:
        simulation.clock.run(simulation.clock.now_s + 1.0)
    return (sum(steps_s) / len(steps_s) if steps_s else math.inf), [peer.span for peer in world.peers]


def arrangements(case: Case, capacity_units: int) -> Iterator[list[Span]]:
    """Yield all sensible arrangements by hand (see `best` in the module's text)."""
    members = [[i for i, region in enumerate(case.scenario.regions) if region == f"place {p}"] for p in range(3)]
    clusters, extra = (
        [one[:SIZE] for one in members[:2]],
        [one for group in members for one in group[SIZE:]] + members[2],
    )
    for count, chosen in itertools.product(STAGES, (clusters, clusters[:1])):
        stages = cut(np.ones(UNITS), count)
        if stages[0].units > capacity_units or sum(map(len, chosen)) < count:
            continue
        for holders in _holders([len(one) for one in chosen], count):
            spans = [STANDING_BY] * case.scenario.devices
            for cluster, numbers in zip(chosen, holders, strict=True):
                for peer, number in zip(cluster, numbers, strict=True):
                    spans[peer] = stages[number]
            yield list(spans)
            for peer, stage in itertools.product(extra, stages):
                yield [*spans[:peer], stage, *spans[peer + 1 :]]


def _holders(sizes: Sequence[int], stages: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield all ways to give each member of each cluster a stage, such that stages have equally many holders, give or take one."""
    total, seen = sum(sizes), set[tuple[tuple[int, ...], ...]]()
    ways = [itertools.combinations_with_replacement(range(stages), size) for size in sizes]
    for holders in itertools.product(*ways):
        counts = np.bincount(np.concatenate(holders), minlength=stages)
        if counts.min() >= total // stages and counts.max() <= -(-total // stages) and holders[::-1] not in seen:
            seen.add(holders)
            yield holders


def worth_s(step_s: float, spans: Sequence[Span]) -> float:
    """Return the seconds of a step, lengthened as peers weigh units with too few holders."""
    return step_s * fragility(float((held_units(spans, UNITS).sum(axis=0) < HOLDERS).mean()))


def best_by_hand(case: Case, run: TrainSettings, capacity_units: int) -> dict[str, Any]:
    """Return the best arrangement as peers weigh it (`best`), the one with the shortest step (`bare`), and their number
    (`tried`)."""
    tried = [(simulated(case, run, spans=spans)[0], spans) for spans in arrangements(case, capacity_units)]
    firm = min(tried, key=lambda one: worth_s(*one))
    bare = min(tried, key=lambda one: one[0])
    return {
        name: {"step_s": round(step_s, 3), "worth_s": round(worth_s(step_s, spans), 3), "places": told(case, spans)}
        for name, (step_s, spans) in (("best", firm), ("bare", bare))
    } | {"tried": len(tried)}


def told(case: Case, spans: Sequence[Span]) -> list[str]:
    """Return for each place the spans that its devices hold, as text."""
    held = sorted(zip(case.scenario.regions, spans, strict=True), key=lambda one: (str(one[0]), one[1]))
    groups = itertools.groupby(held, key=lambda one: one[0])
    return [f"{name}: " + " ".join(f"{span.start}-{span.end}" for _, span in group) for name, group in groups]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    parser.add_argument("--ninth", nargs="+", choices=NINTHS, default=list(NINTHS))
    parser.add_argument("--seeds", type=int, default=3, help="orders of the devices")
    parser.add_argument("--gb", type=int, default=16, help="memory of a card")
    parser.add_argument(
        "--mbps", type=float, nargs="+", default=[500.0, 100.0], help="bandwidth of the slow link, for each two peers"
    )
    arguments = parser.parse_args()
    for name, ninth, mbps in itertools.product(arguments.runs, arguments.ninth, arguments.mbps):
        found = compared(name, ninth, mbps, arguments.gb, arguments.seeds)
        print(json.dumps({"run": name, "ninth": ninth, "mbps": mbps, **found}), flush=True)


def compared(name: str, ninth: str, mbps: float, gb: int, seeds: int) -> dict[str, Any]:
    """Return the best arrangements by hand, and the steps of peers that organise themselves, over all seeds."""
    hidden, run = RUNS[name]
    case = case_of(ninth, mbps, hidden, gb, 0)
    capacity_units = case.model.capacity_units(gb * 10**9, trains=True, cache_tokens=0)
    by_hand = best_by_hand(case, run, capacity_units)
    found: dict[str, Any] = {}
    for known, rule in (("known", run), ("usual", USUAL)):
        lived = [(*simulated(case := case_of(ninth, mbps, hidden, gb, seed), run, rule), case) for seed in range(seeds)]
        worst_s, spans, where = max(lived, key=lambda one: one[0])
        found[known] = {
            "steps_s": [round(step_s, 3) for step_s, *_ in lived],
            "worth_s": round(worth_s(worst_s, spans), 3),
            "of_best": round(worth_s(worst_s, spans) / by_hand["best"]["worth_s"], 3),
            "of_bare": round(worst_s / by_hand["bare"]["step_s"], 3),
            "places": told(where, spans),
        }
    return by_hand | found


if __name__ == "__main__":
    main()
