"""Timeline of a session: the parts of the time of each of its tokens, from the traces of the hops of its route.

No two clocks are compared. A token's time is the time at the last hop between the token before and this one; the part not spent at
hops was spent on the way. A link that kept a token longer than usual shows in the difference between the sending time at one hop
and the arrival at the next: the offset of their clocks is the same in all of them, so subtracting their median removes it. If the
client drives the session, its own time counts as time on the way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from swarmnode.codec.measuring_messages import Trace, TraceStep
from swarmnode.codec.messages import ProposerKind
from swarmnode.measuring.meters import ACCEPTED, WASTED
from swarmnode.net.interfaces import PeerId

ROUNDING_US = 3  # rounding error of a sum of three times


@dataclass(frozen=True)
class Typical:
    """Median and largest of some durations or sizes."""

    median: float
    worst: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Typical:
        """Return median and largest of the values; zeros if there are none."""
        found = list(values)
        return cls(median(found), max(found)) if found else cls(0, 0)


@dataclass(frozen=True)
class TimelinePart:
    """Part of a token's time at a peer, of the kind `what` (wait, compute, leave); for the kind `way`, between peers, `peer` is
    empty."""

    what: str
    peer: PeerId
    us: int


@dataclass(frozen=True)
class Late:
    """Link that kept a token longer than usual."""

    source: PeerId
    target: PeerId
    us: int


@dataclass(frozen=True)
class Token:
    """The token drawn for `position`, and the parts of its time. `total_us` is None if no hop measured it."""

    position: int
    total_us: int | None
    parts: tuple[TimelinePart, ...]
    late: Late | None = None

    @property
    def longest(self) -> TimelinePart:
        """The longest part of the time."""
        return max(self.parts, key=lambda part: part.us)

    @property
    def us(self) -> int:
        """Microseconds that the token took; if unmeasured, the sum of its parts at hops."""
        return sum(part.us for part in self.parts) if self.total_us is None else self.total_us


class Stop:
    """Hop of the timeline: a peer, its units, and its decode steps.

    `decoded` has the last step by each position after one that was decoded: steps of one position, and steps with guesses.
    """

    def __init__(self, peer: PeerId, trace: Trace) -> None:
        self.peer = peer
        self.span = (trace.start, trace.end)
        self.steps = trace.steps
        steps = [step for step in trace.steps if step.count == 1 or step.guessed]
        self.decoded = {end: step for step in steps for end in range(step.end - step.count + 1, step.end + 1)}
        self._by_end = {**{step.end: step for step in trace.steps}, **self.decoded}
        self.guessed = sum(step.guessed for step in steps)  # positions
        self.wasted = sum(step.count for step in steps) - len(self.decoded)  # positions that were computed again
        self.drafts = Counter(
            {
                (ProposerKind.numbered(one.proposer).label, result): count
                for one in trace.drafts
                for result, count in ((ACCEPTED, one.accepted), (WASTED, one.wasted))
            }
        )

    def __repr__(self) -> str:
        return f"<Stop at {self.peer} with units {self.span}: {len(self.decoded)} tokens>"

    def typical(self, figure: Callable[[TraceStep], int]) -> Typical:
        """Return median and largest of `figure` over the steps of one token."""
        return Typical.of(map(figure, self.decoded.values()))

    def since_last(self, position: int) -> int | None:
        """Return the microseconds between the sending of the position before and of this one.

        None if one of them is unknown, or in a replay, where steps arrive before the steps that they follow are done.
        """
        before, now = self._by_end.get(position - 1), self.decoded.get(position)
        if before is None or now is None:
            return None
        if not (before.guessed or now.guessed) and now.came_us + ROUNDING_US < done_us(before):
            return None
        return max(0, sent_us(now) - sent_us(before))

    def until_next(self, position: int) -> int | None:
        """Return the microseconds between the arrival of this position and of the next; None if one of them is unknown."""
        now, after = self.decoded.get(position), self.decoded.get(position + 1)
        return None if now is None or after is None else max(0, after.came_us - now.came_us)


def done_us(step: TraceStep) -> int:
    """Return when a step's pass ended, on its hop's clock."""
    return step.came_us + step.wait_us + step.compute_us


def sent_us(step: TraceStep) -> int:
    """Return when a step left, on its hop's clock."""
    return step.came_us + step.stay_us


class Timeline:
    """Timeline of one session over the peers that remember it."""

    def __init__(self, traces: Mapping[PeerId, Trace]) -> None:
        self.stops = sorted((Stop(peer, trace) for peer, trace in traces.items()), key=lambda stop: stop.span)
        self._first = min((stop.span[0] for stop in self.stops), default=0)  # unit
        self._last = max((stop.span[1] for stop in self.stops), default=0)  # the one after the last unit

    def __repr__(self) -> str:
        return f"<Timeline over {len(self.stops)} hops>"

    @property
    def drafts(self) -> Counter[tuple[str, str]]:
        """Guesses of all first hops that the session had, by proposer and result."""
        return sum((stop.drafts for stop in self.stops), Counter())

    def slowest(self, count: int) -> list[Token]:
        """Return the `count` tokens that took longest, the slowest first."""
        return sorted(self.tokens(), key=lambda token: -token.us)[:count]

    def tokens(self) -> list[Token]:
        """Return all tokens whose steps are remembered, in order. The prompt, whose steps have many positions, is left out."""
        positions = sorted({position for stop in self.stops for position in stop.decoded})
        late = self._late()
        return [self._token(position, late.get(position)) for position in positions]

    def _token(self, position: int, late: Late | None) -> Token:
        parts = [
            part for stop in self._stops_at(position) for part in timeline_parts(stop.peer, stop.decoded[position])
        ]
        total_us = self._total_us(position)
        if total_us is not None:
            parts.append(TimelinePart("way", "", max(0, total_us - sum(part.us for part in parts))))
        return Token(position, total_us, tuple(parts), late)

    def _stops_at(self, position: int) -> list[Stop]:
        """Return the hops that computed a position, in the order of their units; of two with the same units, one."""
        found: dict[tuple[int, int], Stop] = {}
        for stop in self.stops:
            if position in stop.decoded:
                found[stop.span] = stop
        return list(found.values())

    def _total_us(self, position: int) -> int | None:
        """Return the token's time by the last hop, else by the first (if the last has changed and had to catch up); None if neither
        knows it."""
        at_last = (stop.since_last(position) for stop in self.stops if stop.span[1] == self._last)
        at_first = (stop.until_next(position) for stop in self.stops if stop.span[0] == self._first)
        return next((us for us in (*at_last, *at_first) if us is not None), None)

    def _late(self) -> dict[int, Late]:
        """Return for each position the link that delayed it most beyond the link's median."""
        latest: dict[int, Late] = {}
        for source, target, lag in self._links():
            delays = {
                position: target.decoded[position].came_us - sent_us(source.decoded[position - lag])
                for position, step in target.decoded.items()
                if position - lag in source.decoded and not (lag and step.guessed)  # a guess comes before the token
            }
            usual_us = median(delays.values()) if delays else 0
            for position, delay_us in delays.items():
                late_us = round(delay_us - usual_us)
                if late_us > 0 and (position not in latest or late_us > latest[position].us):
                    latest[position] = Late(source.peer, target.peer, late_us)
        return latest

    def _links(self) -> list[tuple[Stop, Stop, int]]:
        """Return the links (from, to, lag in positions): from each hop to the next, and in a ring from the last to the first with
        lag 1."""
        pairs = [(source, target) for source in self.stops for target in self.stops if source is not target]
        onward = [(source, target, 0) for source, target in pairs if source.span[1] == target.span[0]]
        around = (self._last, self._first)
        return onward + [(source, target, 1) for source, target in pairs if (source.span[1], target.span[0]) == around]


def timeline_parts(peer: PeerId, step: TraceStep) -> tuple[TimelinePart, ...]:
    """Return the parts of a step's time at a hop. `leave` is the time between computing and sending, when the hop had other
    work."""
    left_us = max(0, step.stay_us - step.wait_us - step.compute_us)
    return (
        TimelinePart("wait", peer, step.wait_us),
        TimelinePart("compute", peer, step.compute_us),
        TimelinePart("leave", peer, left_us),
    )
