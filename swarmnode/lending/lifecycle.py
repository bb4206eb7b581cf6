"""Where a node is in lending its machine, and where it goes from there.

Owners and rules say PAUSE, FINISH and RESUME; the node says what has happened. What is not in the table changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from types import MappingProxyType


class LendingState(Enum):
    """As volunteers know them."""

    WAITING = "waiting"  # for the swarm, for weights, or for the span to be loaded
    RUNNING = "running"
    DRAINING = "draining"  # sessions move to other peers
    PAUSED = "paused"  # nothing is held, nothing is taken
    FINISHING = "finishing"  # what runs goes on to its end, nothing new is taken


class LendingEvent(Enum):
    """What makes it change."""

    LOADED = auto()  # units are served
    MOVED = auto()  # other units are to be served: those held are let go
    DRAINED = auto()  # nothing is held any more
    PAUSE = auto()
    FINISH = auto()
    RESUME = auto()  # nobody wants it to pause or to finish (any more)


_State, _Event = LendingState, LendingEvent
TRANSITIONS: Mapping[tuple[LendingState, LendingEvent], LendingState] = MappingProxyType(
    {
        (_State.WAITING, _Event.LOADED): _State.RUNNING,
        (_State.WAITING, _Event.PAUSE): _State.DRAINING,
        (_State.WAITING, _Event.FINISH): _State.DRAINING,
        (_State.RUNNING, _Event.MOVED): _State.WAITING,
        (_State.RUNNING, _Event.PAUSE): _State.DRAINING,
        (_State.RUNNING, _Event.FINISH): _State.FINISHING,
        (_State.FINISHING, _Event.PAUSE): _State.DRAINING,
        (_State.FINISHING, _Event.RESUME): _State.RUNNING,
        (_State.FINISHING, _Event.DRAINED): _State.PAUSED,
        (_State.DRAINING, _Event.DRAINED): _State.PAUSED,
        (_State.PAUSED, _Event.RESUME): _State.WAITING,
    }
)


def next_state(state: LendingState, event: LendingEvent) -> LendingState:
    """Where the event leads; the same state where it changes nothing."""
    return TRANSITIONS.get((state, event), state)
