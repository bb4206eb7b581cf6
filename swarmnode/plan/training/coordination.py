"""Coordination of a training, and the progress of its step: a state machine that every stage keeps for itself.

Pure: (phase, event) -> (phase, actions). A step is leased and counted (STEPPING), agreed on (REDUCING), and committed; if
the replicas disagree, the step is leased and counted again. A live node feeds the machine with the events of its messages
(`training/coordinator/coordinator.py`; `training/coordinator/step_loop.py` says when an event of a step has occurred), the
simulator with simulated events (`simulate/steps/simulated_training.py`); both carry out the actions. `docs/training-step.md`
explains the machine, `protocol/training.md` has the same table for other implementations.

Recovery of a training: the step to resume from, given what the live peers hold in memory, as agreed gradients, or on
disk.

Pure, so that each new coordinator comes to the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.view import Span


class Phase(Enum):
    """Phase of a stage's machine. In the last four phases the stage is the coordinator."""

    VACANT = "nobody coordinates, as far as is known here"
    FOLLOWING = "another peer coordinates"
    CANDIDATE = "it is our turn, and somebody else's word may be on its way"
    RENDEZVOUS = "all stages are asked what they hold"
    STEPPING = "leases are out, counts come in"
    REDUCING = "replicas agree on the step's gradients"
    OVER = "all steps are done, or the run cannot go on"


class Event(Enum):
    """Event that can change the phase of a stage."""

    FOLLOWED = "another peer coordinates in a newer term, and this stage follows it"
    DESERTED = "the coordinator is lost, silent, or may not coordinate any more"
    OUR_TURN = "of those who may coordinate and are ready, we are the eldest"
    NOT_OUR_TURN = "somebody older has come"
    SETTLED = "nobody else took over while we waited"
    GATHERED = "the stages that answered hold all units at some step"
    COUNTED = "every unit has counted every microbatch, and no lease is out"
    AGREED = "all members have the step's gradients"
    DISAGREED = "a member is lost, failed or is late"
    UNCOVERED = "a unit has nobody who takes part, or a stage did not get to the step"
    FINISHED = "the last step is committed"
    FAILED = "a loss or a gradient is NaN or infinite by the word of more than one, or all holders of a unit fail at the same"
    OTHER_RUN = "a trainer brings another run, and this one is over"
    SAME_RUN = "a trainer wants a run that failed to be tried again"


class Action(Enum):
    """Action that the driver of the machine carries out after a transition."""

    SETTLE = "wait for a moment, then look again whose turn it is"
    CALL_ROLL = "take a newer term and ask all stages what they hold"
    GATHER = "bring every stage to the step that was found"
    LEASE = "give out what is missing"
    REDUCE = "have the replicas agree"
    COMMIT = "have them update, and tell how the step went"
    STOP = "tell that the run is over, and why"
    BEGIN = "have all begin the other run at its step 0"
    RESIGN = "let go of everybody"


SETTLE_S = 0.3  # a candidate waits that long: another's word may be on its way
COORDINATING = frozenset({Phase.RENDEZVOUS, Phase.STEPPING, Phase.REDUCING, Phase.OVER})

Outcome = tuple[Phase, tuple[Action, ...]]

TRANSITIONS: Mapping[tuple[Phase, Event], Outcome] = {
    (Phase.VACANT, Event.FOLLOWED): (Phase.FOLLOWING, ()),
    (Phase.VACANT, Event.OUR_TURN): (Phase.CANDIDATE, (Action.SETTLE,)),
    (Phase.FOLLOWING, Event.DESERTED): (Phase.VACANT, ()),
    (Phase.CANDIDATE, Event.FOLLOWED): (Phase.FOLLOWING, ()),
    (Phase.CANDIDATE, Event.NOT_OUR_TURN): (Phase.VACANT, ()),
    (Phase.CANDIDATE, Event.SETTLED): (Phase.RENDEZVOUS, (Action.CALL_ROLL,)),
    (Phase.RENDEZVOUS, Event.GATHERED): (Phase.STEPPING, (Action.GATHER, Action.LEASE)),
    (Phase.STEPPING, Event.FAILED): (Phase.OVER, (Action.STOP,)),
    (Phase.STEPPING, Event.FINISHED): (Phase.OVER, (Action.STOP,)),
    (Phase.STEPPING, Event.UNCOVERED): (Phase.RENDEZVOUS, (Action.CALL_ROLL,)),
    (Phase.STEPPING, Event.COUNTED): (Phase.REDUCING, (Action.REDUCE,)),
    (Phase.REDUCING, Event.FAILED): (Phase.OVER, (Action.STOP,)),
    (Phase.REDUCING, Event.DISAGREED): (Phase.STEPPING, (Action.LEASE,)),
    (Phase.REDUCING, Event.AGREED): (Phase.STEPPING, (Action.COMMIT, Action.LEASE)),
    (Phase.OVER, Event.OTHER_RUN): (Phase.STEPPING, (Action.BEGIN, Action.LEASE)),
    (Phase.OVER, Event.SAME_RUN): (Phase.RENDEZVOUS, (Action.CALL_ROLL,)),
    **{(phase, Event.FOLLOWED): (Phase.FOLLOWING, (Action.RESIGN,)) for phase in COORDINATING},
}
"""Transitions of the machine. An event without an entry changes nothing. If several events of a phase have occurred, the first
one in this order counts."""


def transition(phase: Phase, event: Event) -> Outcome:
    """Return the phase that follows and the actions to carry out; the same phase and no actions if `event` is not in the
    table."""
    return TRANSITIONS.get((phase, event), (phase, ()))


class Coordination:
    """State machine of one stage in the training, with its current phase."""

    def __init__(self, phase: Phase = Phase.VACANT) -> None:
        self.phase = phase

    @property
    def is_coordinator(self) -> bool:
        """Whether this stage is the coordinator of the training."""
        return self.phase in COORDINATING

    def due(self, has_come: Callable[[Event], bool]) -> Event | None:
        """Return the first event of this phase, in the order of the table, that has come about; None if none has."""
        return next((event for phase, event in TRANSITIONS if phase is self.phase and has_come(event)), None)

    def on(self, event: Event) -> tuple[Action, ...]:
        """Enter the phase that follows `event` and return the actions to carry out; empty if nothing changes."""
        self.phase, actions = transition(self.phase, event)
        return actions


@dataclass(frozen=True)
class HoldingReport:
    """A peer's place in a run: the `step` in memory if `ready`, and the steps `stored_steps` on disk. `reduced`: the peer has the
    step's gradients and only waits for the command to commit `step`."""

    span: Span
    step: int
    ready: bool
    reduced: bool = False
    stored_steps: frozenset[int] = frozenset()
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


def plan_anew(units: int, reports: Mapping[PeerId, HoldingReport], *, stored_from: int) -> RecoveryPlan | None:
    """Return the plan that takes all peers back to step 0, as the last resort: from disk if some peer keeps step 0, else
    from the parameters of the swarm's foundation. The latter needs more than half of the peers beyond step 0 to report that
    the run began there.

    None if neither is possible, layers have no holder, or a peer has reached step `stored_from`, which all peers write to disk:
    a peer that is away may still have it.
    """
    kept = {step for report in reports.values() for step in report.stored_steps}
    if max(kept | {report.step for report in reports.values()}, default=0) >= stored_from:
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
    kept = {step for report in reports.values() for step in report.stored_steps if step > 0}
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
    restore = those(lambda report: disk and step in report.stored_steps) - stay - commit
    able = stay | commit | restore
    held = {unit for peer in able for unit in range(*reports[peer].span)}
    missing = tuple(unit for unit in range(units) if unit not in held)
    return RecoveryPlan(step, stay, commit, restore, frozenset(reports) - able, missing)
