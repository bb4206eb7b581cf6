"""Where a training can go on from, given what the live peers hold: in memory, as agreed gradients, or on disk.

Decided purely, so that whoever leads after a coordinator was lost comes to the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span


@dataclass(frozen=True)
class HoldingReport:
    """A peer's place in a run: `step` in memory if `ready`; `reduced`: it only waits for the word to commit `step`."""

    span: Span
    step: int
    ready: bool
    reduced: bool = False
    kept: frozenset[int] = frozenset()
    founded: bool = False  # began the run with what the swarm was founded with


@dataclass(frozen=True)
class RecoveryPlan:
    """The step to go on from, and what each peer does to get there; `missing` units have nobody who could. `anew`: all begin with
    what the swarm was founded with."""

    step: int
    stay: frozenset[PeerId] = frozenset()
    commit: frozenset[PeerId] = frozenset()
    restore: frozenset[PeerId] = frozenset()
    sync: frozenset[PeerId] = frozenset()
    missing: tuple[int, ...] = ()
    anew: bool = False


def plan_anew(units: int, reports: Mapping[PeerId, HoldingReport], *, kept_from: int) -> RecoveryPlan | None:
    """All back to step 0, for when no other way is left. Of a later run it is on disks. The first one's is what the swarm was
    founded with, where by the word of more than half of those who have come further it is the first. None where neither is so,
    units have nobody, or step `kept_from` was reached, which all write down: who is away may have it."""
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
    """The newest step that the peers cover together. With `roll_back` steps on disk count too.

    A step 0 counts only where nobody is further: a run is never thrown away for a peer that has nothing.
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
    """How the peers can be brought to `step`."""

    def those(does: Callable[[HoldingReport], bool]) -> frozenset[PeerId]:
        return frozenset(peer for peer, report in reports.items() if does(report))

    stay = those(lambda report: report.ready and report.step == step)
    told = bool(stay)  # the word to commit names the gradient's norm, which only those know who have heard it
    commit = those(lambda report: told and report.ready and report.reduced and report.step == step - 1)
    restore = those(lambda report: disk and step in report.kept) - stay - commit
    able = stay | commit | restore
    held = {unit for peer in able for unit in range(*reports[peer].span)}
    missing = tuple(unit for unit in range(units) if unit not in held)
    return RecoveryPlan(step, stay, commit, restore, frozenset(reports) - able, missing)
