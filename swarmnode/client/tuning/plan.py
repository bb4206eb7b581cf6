"""Plan of a tuning: what each peer of its route will hold and see, and how long a step is expected to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmnode.codec.body import HopSpec
from swarmnode.codec.tuning_messages import AdapterOpened
from swarmnode.compute.throttle import TRAINING_WORK
from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement
from swarmnode.swarm.records.run import Run
from swarmnode.tuning.client.local_route import HERE


@dataclass(frozen=True)
class PlannedHop:
    """Hop of a tuning: its name, its layers, the bytes that it keeps, and what its owner could see: nothing new on this machine."""

    name: str
    hop: HopSpec
    held: AdapterOpened
    sees: tuple[str, ...]


@dataclass(frozen=True)
class TuningPlan:
    """Plan of a tuning on one route, from step `step` on. `step_s` is 0 if the speed of a peer is not known.

    `why` says why the route before was left; empty for the first route, and after a departure in order.
    """

    recipe: AdapterRecipe
    run: Run
    step: int
    hops: tuple[PlannedHop, ...]
    step_s: float
    why: str = ""


def plan_of(
    recipe: AdapterRecipe,
    run: Run,
    step: int,
    held: Sequence[tuple[HopSpec, AdapterOpened]],
    peers: Mapping[PeerId, Announcement],
    *,
    window: int,
    why: str = "",
) -> TuningPlan:
    """Return the plan for an adapter that is open at the hops of `held` for `step` and all after it.

    `peers` are announcements by peer.
    """
    hops = []
    for index, (hop, opened) in enumerate(held):
        told = peers.get(hop.peer)
        name = (told.name if told is not None else "") or (HERE if hop.peer == HERE else hop.peer[-8:])
        ids, answers = ("token ids",) * (index == 0), ("answers",) * (index == len(held) - 1)
        sees = () if hop.peer == HERE else ("activations", "gradients", *ids, *answers)
        hops.append(PlannedHop(name, hop, opened, sees))
    step_s = expected_step_s(run, [hop for hop, _ in held], peers, window)
    return TuningPlan(recipe, run, step, tuple(hops), step_s, why)


def expected_step_s(run: Run, hops: Sequence[HopSpec], peers: Mapping[PeerId, Announcement], window: int) -> float:
    """Estimate the seconds of a step from announced speeds: microbatches flow through the hops, `window` at a time.

    Returns 0 if a speed is not known. The estimate counts neither the network nor the hops' sessions.
    """
    hop_s = []
    for hop in hops:
        told = peers.get(hop.peer)
        speed = 0.0 if told is None else told.prefill_units_per_s
        if not speed:
            return 0.0
        hop_s.append((hop.end - hop.start) * run.positions * TRAINING_WORK / speed)
    return sum(hop_s) + (run.microbatches - 1) * max(max(hop_s), sum(hop_s) / window)
