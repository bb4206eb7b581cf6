"""Lending of one node: its state machine, and what its owner and its rules want of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from swarmnode.decisions import DecisionLog, Topic
from swarmnode.lending.rules import Rules
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings

OWNER, RULES = "owner", "rules"  # who wants something
WANTS = {OWNER: "wants", RULES: "want"}


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


SETTLED = {
    LendingEvent.RESUME: (LendingState.RUNNING,),
    LendingEvent.PAUSE: (LendingState.PAUSED,),
    LendingEvent.FINISH: (LendingState.FINISHING, LendingState.PAUSED),
}


class Keep(Enum):
    """Where the weights of a paused node stay."""

    DISK = "disk"  # all memory is given back; to go on they are loaded again
    MEMORY = "memory"  # of the host; the device is given back


@dataclass(frozen=True)
class Wish:
    """That the node shall not lend, and why. `gently`: once what runs is finished; `leaves`: and it leaves the swarm then."""

    reason: str
    gently: bool = False
    leaves: bool = False

    @property
    def manner(self) -> str:
        """What the node is to do."""
        if self.leaves:
            return "finish and leave"
        return "finish" if self.gently else "pause"


class Lending:
    """Used on the loop. `on_change` hears of every new state."""

    def __init__(
        self,
        on_change: Callable[[LendingState, str], None] = lambda _state, _reason: None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.decisions = DecisionLog(now)
        self.rules = Rules()
        self._pauses = 0
        self.state = LendingState.WAITING
        self.keep = Keep.DISK
        self._wishes: dict[str, Wish] = {}
        self._on_change = on_change
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Lending {self.state.value}{f', {self.reason}' if self.reason else ''}>"

    @property
    def reason(self) -> str:
        """Why it does not lend, or soon will not; empty where nobody minds."""
        reason = "; ".join(wish.reason for wish in self._wishes.values())
        if self._wanted is not LendingEvent.FINISH:
            return reason
        if self.state is LendingState.PAUSED:
            return f"finished: {reason}"
        return f"{reason}; then it leaves" if self._leaves else reason

    def readings(self) -> Readings:
        """What Prometheus may know of it."""
        for state in LendingState:
            yield Reading(table.LENDING_STATE, state is self.state, (state.value,))
        for by in WANTS:
            yield Reading(table.LENDING_HELD, by in self._wishes, (by,))
        yield Reading(table.LENDING_PAUSES, self._pauses)

    def pause(self, reason: str, *, by: str = OWNER, keep: Keep | None = None) -> None:
        """Let sessions move away and free the device."""
        if keep is not None:
            self.keep = keep
        self._wish(by, Wish(reason))

    def finish(self, reason: str, *, by: str = OWNER, leave: bool = False) -> None:
        """Take nothing new, and pause when nothing runs any more; to `leave` ends the node then."""
        self._wish(by, Wish(reason, gently=True, leaves=leave))

    def resume(self, *, by: str = OWNER) -> None:
        """Lend again, if nobody else minds."""
        self._wishes.pop(by, None)
        self._settle()

    def follow(self, rules: Rules) -> None:
        """These rules hold from now on."""
        self.rules = rules
        self._wake()

    async def ruled(self) -> None:
        """Wait until there is a rule at all."""
        while not self.rules.any:
            await self._changed.wait()

    def happened(self, event: LendingEvent) -> None:
        """The node did something. What was wanted meanwhile follows at once."""
        self._enter(next_state(self.state, event))
        self._settle()

    async def until(self, *states: LendingState) -> None:
        """Wait for one of these states."""
        while self.state not in states:
            await self._changed.wait()

    async def settled(self) -> None:
        """Wait until it is where it is wanted to be; that may change meanwhile."""
        while self.state not in SETTLED[self._wanted]:
            await self._changed.wait()

    async def finished(self) -> None:
        """Wait until nothing runs any more where the node is to leave then."""
        while self.state is not LendingState.PAUSED or not self._leaves:
            await self._changed.wait()

    @property
    def _leaves(self) -> bool:
        return any(wish.leaves for wish in self._wishes.values())

    def _wish(self, by: str, wish: Wish) -> None:
        self._wishes[by] = wish
        self._settle()
        self._wake()

    @property
    def _wanted(self) -> LendingEvent:
        if not self._wishes:
            return LendingEvent.RESUME
        gently = all(wish.gently for wish in self._wishes.values())
        return LendingEvent.FINISH if gently else LendingEvent.PAUSE

    def _settle(self) -> None:
        self._enter(next_state(self.state, self._wanted))

    def _facts(self) -> tuple[str, ...]:
        wishes = (f"its {by} {WANTS[by]} it to {wish.manner}: {wish.reason}" for by, wish in self._wishes.items())
        return tuple(wishes) or ("neither its owner nor a rule wants it to pause",)

    def _enter(self, state: LendingState) -> None:
        if state is not self.state:
            self.decisions.note(Topic.LENDING, f"was {self.state.value}, is {state.value}", self._facts())
            self.state = state
            self._pauses += state is LendingState.PAUSED
            self._on_change(state, self.reason)
            self._wake()

    def _wake(self) -> None:
        """Whoever waits looks; the next change is another event."""
        self._changed.set()
        self._changed = asyncio.Event()
