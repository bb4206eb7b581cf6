"""Coordination of a training, and the progress of its step: a state machine that every stage keeps for itself.

Pure: (phase, event) -> (phase, actions). A step is leased and counted (STEPPING), agreed on (REDUCING), and committed; if
the replicas disagree, the step is leased and counted again. A live node feeds the machine with the events of its messages
(`training/coordinator/coordinator.py`; `training/coordinator/step_loop.py` says when an event of a step has occurred), the
simulator with simulated events (`simulate/steps/training.py`); both carry out the actions. `docs/training-step.md` explains
the machine, `protocol/training.md` has the same table for other implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum


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
IN_OFFICE = frozenset({Phase.RENDEZVOUS, Phase.STEPPING, Phase.REDUCING, Phase.OVER})

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
    **{(phase, Event.FOLLOWED): (Phase.FOLLOWING, (Action.RESIGN,)) for phase in IN_OFFICE},
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

    def __repr__(self) -> str:
        return f"<Coordination {self.phase.name}>"

    @property
    def in_office(self) -> bool:
        """Whether this stage is the coordinator of the training."""
        return self.phase in IN_OFFICE

    def due(self, has_come: Callable[[Event], bool]) -> Event | None:
        """Return the first event of this phase, in the order of the table, that has come about; None if none has."""
        return next((event for phase, event in TRANSITIONS if phase is self.phase and has_come(event)), None)

    def on(self, event: Event) -> tuple[Action, ...]:
        """Enter the phase that follows `event` and return the actions to carry out; empty if nothing changes."""
        self.phase, actions = transition(self.phase, event)
        return actions
