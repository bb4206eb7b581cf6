"""The table of who coordinates: every phase with every event."""

from __future__ import annotations

import itertools
import re
from collections import deque
from pathlib import Path

import pytest

from swarmnode.plan.training.coordination import (
    COORDINATING,
    TRANSITIONS,
    Action,
    Coordination,
    Event,
    Phase,
    transition,
)

PAGE = Path(__file__).parents[3] / "protocol" / "training.md"


def written() -> dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]]:
    """The state table of the protocol's page."""
    section = PAGE.read_text().split("### State table")[1].split("\n#")[0]
    rows = [re.findall(r"[A-Z_]+|-", line) for line in section.splitlines() if re.match(r"\| [A-Z]", line)]
    return {
        (Phase[phase], Event[event]): (Phase[after], tuple(Action[name] for name in does if name != "-"))
        for phase, event, after, *does in rows
    }


def test_the_page_has_the_table() -> None:
    assert written() == dict(TRANSITIONS)
    by_itself = [row for row in TRANSITIONS if row[1] is not Event.FOLLOWED]
    assert [row for row in written() if row[1] is not Event.FOLLOWED] == by_itself, "in the order in which they count"


@pytest.mark.parametrize("phase", Phase)
def test_of_the_events_that_have_come_about_the_first_one_of_the_table_counts(phase: Phase) -> None:
    own = [event for row, event in TRANSITIONS if row is phase]
    machine = Coordination(phase)
    assert machine.due(lambda _event: True) is own[0] and machine.due(lambda _event: False) is None
    assert machine.due(lambda event: event is own[-1]) is own[-1]
    assert machine.due(lambda event: event not in own) is None, "it has no place in this phase"
    assert machine.phase is phase


@pytest.mark.parametrize(("phase", "event"), [*itertools.product(Phase, Event)])
def test_every_event_in_every_phase(phase: Phase, event: Event) -> None:
    after, actions = transition(phase, event)
    if (phase, event) not in TRANSITIONS:
        assert (after, actions) == (phase, ()), "what is not expected changes nothing"
    if event is Event.FOLLOWED:
        assert after is Phase.FOLLOWING, "another's word ends every office"
    assert (Action.RESIGN in actions) == (phase in COORDINATING and after not in COORDINATING)
    assert (Action.CALL_ROLL in actions) == (after is Phase.RENDEZVOUS and phase is not Phase.RENDEZVOUS)
    assert (Action.REDUCE in actions) == (after is Phase.REDUCING and phase is not Phase.REDUCING)
    assert (Action.STOP in actions) == (after is Phase.OVER and phase is not Phase.OVER)
    if after is Phase.STEPPING and phase is not Phase.STEPPING:
        assert actions[-1] is Action.LEASE, "a step begins, or goes on, with leases"
    machine = Coordination(phase)
    assert machine.on(event) == actions and machine.phase is after
    assert machine.is_coordinator == (after in COORDINATING)


def test_every_phase_can_be_reached_and_left() -> None:
    seen, ahead = {Phase.VACANT}, deque([Phase.VACANT])
    while ahead:
        phase = ahead.popleft()
        for event in Event:
            after, _ = transition(phase, event)
            if after not in seen:
                seen.add(after)
                ahead.append(after)
    assert seen == set(Phase)
    for phase in Phase:
        assert any(transition(phase, event)[0] is not phase for event in Event)


def test_everything_has_a_use() -> None:
    assert {event for _, event in TRANSITIONS} == set(Event)
    assert {action for _, actions in TRANSITIONS.values() for action in actions} == set(Action)
