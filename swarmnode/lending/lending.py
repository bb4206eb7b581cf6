"""Lending of one node: its state machine, and the wishes of its owner and its rules.

Rules for yielding the machine: pure functions over observations of it.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType

from swarmnode.config import Size
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")


@dataclass(frozen=True)
class Hours:
    """Span of the day from `start` to `end`, over midnight if the end is not later."""

    start: datetime.time
    end: datetime.time

    def __str__(self) -> str:
        return f"{self.start:%H:%M}-{self.end:%H:%M}"

    def contain(self, when: datetime.time) -> bool:
        """Return whether a time lies in the span."""
        if self.start < self.end:
            return self.start <= when < self.end
        return when >= self.start or when < self.end


@dataclass(frozen=True)
class Rules:
    """Conditions under which a node lends; an unset rule does not count. CPU shares are of all CPUs, 0 to 1."""

    only_idle_s: float | None = None  # without keyboard or mouse input
    max_others_load: float | None = None  # largest share of the CPUs for other programs
    exclusive: frozenset[str] = frozenset()  # programs during which the node does not lend
    hours: Hours | None = None
    days: frozenset[int] = frozenset()  # 0 is Monday
    on_mains: bool = False
    max_memory_pressure: float | None = None  # largest share of the time that some program waits for memory
    monthly_bytes: Size = Size()  # sent and received, in a month
    month_day: int = 1  # first day of the month that counts
    unmetered: bool = False  # not on metered connections
    max_others_gpu_bytes: Size = Size()  # largest memory of a card for other programs
    max_others_gpu_load: float | None = None  # largest share of a card's time for other programs

    @property
    def any(self) -> bool:
        """Whether any rule is set."""
        return self != Rules(month_day=self.month_day)


@dataclass(frozen=True)
class Surroundings:
    """Observations of the machine. None is unknown, and violates no rule."""

    when: datetime.datetime
    idle_s: float | None = None
    others_load: float | None = None
    programs: frozenset[str] = frozenset()
    on_mains: bool | None = None
    memory_pressure: float | None = None
    month_bytes: int = 0
    metered: bool | None = None
    others_gpu_bytes: int | None = None
    others_gpu_load: float | None = None


def reason_to_pause(rules: Rules, seen: Surroundings) -> str:
    """Return the first reason not to lend now; empty if there is none."""
    return next(_reasons(rules, seen), "")


def _reasons(rules: Rules, seen: Surroundings) -> Iterator[str]:
    running = sorted(rules.exclusive & seen.programs)
    if running:
        yield f"{running[0]} is running"
    if rules.on_mains and seen.on_mains is False:
        yield "on battery"
    if rules.unmetered and seen.metered:
        yield "the connection is metered"
    if _over(seen.others_gpu_bytes, rules.max_others_gpu_bytes):
        yield "other programs need the card's memory"
    if _over(seen.others_gpu_load, rules.max_others_gpu_load):
        yield "other programs need the card"
    if _over(seen.memory_pressure, rules.max_memory_pressure):
        yield "other programs wait for memory"
    if rules.only_idle_s is not None and seen.idle_s is not None and seen.idle_s < rules.only_idle_s:
        yield "the machine is in use"
    if _over(seen.others_load, rules.max_others_load):
        yield "other programs need the CPU"
    if rules.hours is not None and not rules.hours.contain(seen.when.time()):
        yield f"it lends at {rules.hours} only"
    if rules.days and seen.when.weekday() not in rules.days:
        yield f"it lends on {', '.join(DAYS[day] for day in sorted(rules.days))} only"
    if rules.monthly_bytes is not None and seen.month_bytes >= rules.monthly_bytes:
        yield f"the month's {rules.monthly_bytes / 1e9:.3g} GB are used up"


def _over(seen: float | None, limit: float | None) -> bool:
    return seen is not None and limit is not None and seen > limit


OWNER, RULES = "owner", "rules"  # sources of wishes
LENDS = ("running", "finishing")  # values of the states that count as lending
WANTS = {OWNER: "wants", RULES: "want"}
ENDS = {OWNER: "`swarmnode resume` ends that", RULES: "that ends when all rules allow it for a while"}


class LendingState(Enum):
    """State of a node, as volunteers see it."""

    WAITING = "waiting"  # for the swarm, for weights, or for the span to be loaded
    RUNNING = "running"
    DRAINING = "draining"  # sessions move to other peers
    PAUSED = "paused"  # holds and takes nothing
    FINISHING = "finishing"  # finishes what runs, takes nothing new


class LendingEvent(Enum):
    """Event that changes a node's LendingState: loading, a wish of its owner, or the end of its work."""

    LOADED = auto()  # units are served
    MOVED = auto()  # other units are to be served: the present units are dropped
    DRAINED = auto()  # nothing is held any more
    PAUSE = auto()
    FINISH = auto()
    RESUME = auto()  # there is no wish to pause or to finish (any more)


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
    """Return the state after an event; the same state if the event changes nothing."""
    return TRANSITIONS.get((state, event), state)


SETTLED = {
    LendingEvent.RESUME: (LendingState.RUNNING,),
    LendingEvent.PAUSE: (LendingState.PAUSED,),
    LendingEvent.FINISH: (LendingState.FINISHING, LendingState.PAUSED),
}


class Keep(Enum):
    """Place of a paused node's weights."""

    DISK = "disk"  # all memory is given back; they are loaded again to resume
    MEMORY = "memory"  # of the host; the device is given back


@dataclass(frozen=True)
class Wish:
    """Wish that the node shall not lend, and its reason. `gently`: finish running work first; `leaves`: then leave the
    swarm."""

    reason: str
    gently: bool = False
    leaves: bool = False

    @property
    def manner(self) -> str:
        """Action that the node is to take: pause, finish, or finish and leave."""
        return "finish and leave" if self.leaves else "finish" if self.gently else "pause"


class Lending:
    """State of a node's lending, and the wishes about it. Used on the event loop. `on_change` is called with every new
    state."""

    def __init__(
        self,
        on_change: Callable[[LendingState, str], None] = lambda _state, _reason: None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decisions = DecisionLog(now)
        self.rules = Rules()
        self._pauses = 0
        self._clock = clock
        self._since_s = clock()  # of the present state
        self._lent_s = 0.0  # in earlier states
        self.state = LendingState.WAITING
        self.keep = Keep.DISK
        self._wishes: dict[str, Wish] = {}
        self._on_change = on_change
        self._changed = asyncio.Event()

    @property
    def reason(self) -> str:
        """Reason for not lending, now or soon; empty if there is no wish against lending."""
        reason = "; ".join(wish.reason for wish in self._wishes.values())
        if self._wanted is not LendingEvent.FINISH:
            return reason
        if self.state is LendingState.PAUSED:
            return f"finished: {reason}"
        return f"{reason}; then it leaves" if self._leaves else reason

    @property
    def lent_s(self) -> float:
        """Seconds of lending until now, of this run."""
        return self._lent_s + (self._clock() - self._since_s if self.state.value in LENDS else 0.0)

    def readings(self) -> Readings:
        """Yield the metrics of lending."""
        for state in LendingState:
            yield Reading(table.LENDING_STATE, state is self.state, (state.value,))
        for by in WANTS:
            yield Reading(table.LENDING_HELD, by in self._wishes, (by,))
        yield Reading(table.LENDING_PAUSES, self._pauses)
        yield Reading(table.LENT_SECONDS, self.lent_s)

    def pause(self, reason: str, *, by: str = OWNER, keep: Keep | None = None) -> None:
        """Let sessions move to other peers, then free the device. `keep` is the place of the weights; None leaves it as
        it was."""
        if keep is not None:
            self.keep = keep
        self._wish(by, Wish(reason))

    def finish(self, reason: str, *, by: str = OWNER, leave: bool = False) -> None:
        """Take nothing new, and pause when nothing runs any more. With `leave` the node then leaves the swarm."""
        self._wish(by, Wish(reason, gently=True, leaves=leave))

    def resume(self, *, by: str = OWNER) -> None:
        """Withdraw the wish of `by`, and lend again if there is no other wish."""
        self._wishes.pop(by, None)
        self._settle()

    def wants_pause(self, by: str) -> bool:
        """Return whether `by`, the owner or the rules, wants the node not to lend."""
        return by in self._wishes

    def follow(self, rules: Rules) -> None:
        """Replace the rules."""
        self.rules = rules
        self._wake()

    async def ruled(self) -> None:
        """Wait until there is a rule."""
        while not self.rules.any:
            await self._changed.wait()

    def happened(self, event: LendingEvent) -> None:
        """Apply an event of the node, then the wishes."""
        self._enter(next_state(self.state, event))
        self._settle()

    async def until(self, *states: LendingState) -> None:
        """Wait for one of these states."""
        while self.state not in states:
            await self._changed.wait()

    async def settled(self) -> None:
        """Wait until the state is the wanted one; the wishes may change meanwhile."""
        while self.state not in SETTLED[self._wanted]:
            await self._changed.wait()

    async def finished(self) -> None:
        """Wait until nothing runs any more and a wish to leave is in force."""
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

    def _enter(self, state: LendingState) -> None:
        if state is not self.state:
            what = f"is {state.value} now, and was {self.state.value} before"
            wishes = (
                fact
                for by, wish in self._wishes.items()
                for fact in (f"its {by} {WANTS[by]} it to {wish.manner}: {wish.reason}", ENDS[by])
            )
            facts = tuple(wishes) or ("neither its owner nor a rule wants it to pause",)
            self.decisions.record(Topic.LENDING, what, facts)
            self._lent_s, self._since_s = self.lent_s, self._clock()
            self.state = state
            self._pauses += state is LendingState.PAUSED
            self._on_change(state, self.reason)
            self._wake()

    def _wake(self) -> None:
        """Wake all waiters. The next change sets another event."""
        self._changed.set()
        self._changed = asyncio.Event()
