"""Recovery of a training: the step to resume from, given what the live peers hold in memory, as agreed gradients, or on
disk.

Pure, so that each new coordinator comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span


@dataclass(frozen=True)
class HoldingReport:
    """A peer's place in a run: the `step` in memory if `ready`, and the steps `kept` on disk. `reduced`: the peer has the
    step's gradients and only waits for the command to commit `step`."""

    span: Span
    step: int
    ready: bool
    reduced: bool = False
    kept: frozenset[int] = frozenset()
    founded: bool = False  # began the run with the parameters of the swarm's foundation


@dataclass(frozen=True)
class RecoveryPlan:
    """The step to resume from, and the peers by what they do: stay, commit, restore from disk, or sync from others.
    `missing`: layers without a peer that can reach the step. `anew`: all begin with the parameters that the swarm was founded
    with."""

    step: int
    stay: frozenset[PeerId] = frozenset()
    commit: frozenset[PeerId] = frozenset()
    restore: frozenset[PeerId] = frozenset()
    sync: frozenset[PeerId] = frozenset()
    missing: tuple[int, ...] = ()
    anew: bool = False


def plan_anew(units: int, reports: Mapping[PeerId, HoldingReport], *, kept_from: int) -> RecoveryPlan | None:
    """Return the plan that takes all peers back to step 0, as the last resort: from disk if some peer keeps step 0, else
    from the parameters of the swarm's foundation. The latter needs more than half of the peers beyond step 0 to report that
    the run began there.

    None if neither is possible, layers have no holder, or a peer has reached step `kept_from`, which all peers write to disk:
    a peer that is away may still have it.
    """
    kept = {step for report in reports.values() for step in report.kept}
    if max(kept | {report.step for report in reports.values()}, default=0) >= kept_from:
        return None
    if 0 in kept:
        again = _covering(units, reports, 0, disk=True)
        return None if again.missing else again
    further = [report for report in reports.values() if report.ready and report.step > 0]
    is_first = 2 * sum(report.founded for report in further) > len(further)
    held = {unit for report in reports.values() for unit in range(*report.span)}
    return RecoveryPlan(0, restore=frozenset(reports), anew=True) if is_first and len(held) == units else None


def plan_recovery(units: int, reports: Mapping[PeerId, HoldingReport], *, roll_back: bool) -> RecoveryPlan:
    """Return the plan for the newest step that the peers cover together. With `roll_back`, steps on disk count, too. If no
    step covers all layers, the plan for the newest step in memory names the `missing` ones.

    Rolling back never goes to step 0, so that a run is not thrown away for a peer that has nothing.
    """
    newest = max((report.step for report in reports.values() if report.ready), default=0)
    here = _covering(units, reports, newest)
    if not here.missing or not roll_back:
        return here
    kept = {step for report in reports.values() for step in report.kept if step > 0}
    alive = {report.step for report in reports.values() if report.ready and report.step > 0}
    for step in sorted(kept | alive, reverse=True):
        back = _covering(units, reports, step, disk=True)
        if not back.missing:
            return back
    return here


def _covering(units: int, reports: Mapping[PeerId, HoldingReport], step: int, *, disk: bool = False) -> RecoveryPlan:
    """Return the plan that brings the peers to `step`; with `disk`, peers may restore it from disk."""

    def those(does: Callable[[HoldingReport], bool]) -> frozenset[PeerId]:
        return frozenset(peer for peer, report in reports.items() if does(report))

    stay = those(lambda report: report.ready and report.step == step)
    told = bool(stay)  # the command to commit names the gradient's norm, known only to peers that have received it
    commit = those(lambda report: told and report.ready and report.reduced and report.step == step - 1)
    restore = those(lambda report: disk and step in report.kept) - stay - commit
    able = stay | commit | restore
    held = {unit for peer in able for unit in range(*reports[peer].span)}
    missing = tuple(unit for unit in range(units) if unit not in held)
    return RecoveryPlan(step, stay, commit, restore, frozenset(reports) - able, missing)
