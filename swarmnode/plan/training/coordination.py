"""Who coordinates a training, and how far its step is: a state machine that every stage keeps for itself.

Pure: (phase, event) -> (phase, actions). A step is leased and counted (STEPPING), agreed on (REDUCING), and committed; if the
replicas disagree it is leased and counted again. A live node drives the machine by what it hears
(`training/coordinator/coordinator.py`; when an event of a step has come about stands in `training/coordinator/step_loop.py`), the
simulator by what it simulates (`simulate/steps/training.py`); both do what the actions say. `docs/training-step.md` explains the
machine, `protocol/training.md` has the same table for others to build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum


class Phase(Enum):
    """Where a stage stands. The last four are those of a coordinator in office."""

    VACANT = "nobody coordinates, as far as is known here"
    FOLLOWING = "another peer coordinates"
    CANDIDATE = "it is our turn, and somebody else's word may be on its way"
    RENDEZVOUS = "all stages are asked what they hold"
    STEPPING = "leases are out, counts come in"
    REDUCING = "replicas agree on the step's gradients"
    OVER = "all steps are done, or the run cannot go on"


class Event(Enum):
    """What happens to it."""

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
    """What whoever drives the machine does then."""

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
"""An event that is not here changes nothing. Of several that have come about in a phase the first one here counts."""


def transition(phase: Phase, event: Event) -> Outcome:
    """The phase that follows, and what is to be done."""
    return TRANSITIONS.get((phase, event), (phase, ()))


class Coordination:
    """One stage's machine, and the phase that it is in."""

    def __init__(self, phase: Phase = Phase.VACANT) -> None:
        self.phase = phase

    def __repr__(self) -> str:
        return f"<Coordination {self.phase.name}>"

    @property
    def in_office(self) -> bool:
        """Whether this stage coordinates."""
        return self.phase in IN_OFFICE

    def due(self, has_come: Callable[[Event], bool]) -> Event | None:
        """Return the first event of this phase, in the order of the table, that has come about; None if none has."""
        return next((event for phase, event in TRANSITIONS if phase is self.phase and has_come(event)), None)

    def on(self, event: Event) -> tuple[Action, ...]:
        """Something has happened: what is to be done now."""
        self.phase, actions = transition(self.phase, event)
        return actions
