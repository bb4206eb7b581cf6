"""Number of guessed positions that a session keeps in flight, from measured acceptance, turns of the ring and costs of rows.

Let a be the share of guesses that are right, R the seconds of a turn without guesses, and d the seconds of proposing a guess. With
w guesses in flight, b go together. They lengthen a pass by

    x = j + min((1 + s) b p,  f + b p)

seconds at the busiest hop: p for a position, f for a pass, and j for a step of more than one position, which is not replayed. The
steps of the s other sessions in the pass are filled up to the longest one, unless another pass costs less. The hops of the route
are as many as h of the busiest one. Then a token takes

    T(w) = (1 - a) (R + h x + b d + (w - b) p)  +  max((1 - a) (R + h x) a^(w + 1) / (1 - a^(w + 1)),  a (p + f / b),  a d)

A wrong guess costs a turn, and behind it guesses are computed in vain. Every w + 1 right guesses in a row take one more turn,
unless rows cannot be computed or proposed that fast. T(0) = R.

Passes with guesses take time from the S other sessions. At each hop such a pass disturbs the share u of them, for u the share of
time that rows take there, and s = min(1, h u) S. Each second costs h u S / L tokens. L is the least turn of late, because R grows
as guesses crowd the ring. So the window is the w with the most

    W(w) = 1 / T(w)  -  h u S / L  (x / b)  ((1 + (1 - a) w) / T(w) - 1 / R)

It is 0 if that is hardly more than without guesses: under load guesses go last. For a proposer that knows how likely each guess is,
the same costs say how many of its guesses are worth a row (`worthwhile`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

MAX_WINDOW = 32  # guesses in flight at most
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # that are compared
PASSES = 4  # that carry the guesses of a session, one behind the other
KEPT, TURN_KEPT = 1 / 24, 1 / 8  # weight of a new verdict, and of a new turn
TURN_DRIFT = 1.005  # by which the least turn grows with each turn, until a new least one comes
COST_S = 0.5  # seconds of turns after which the cost of rows is asked for again
EXPECTED = 0.7  # acceptance of a proposer before its first verdicts
LEAST_GAIN = 1.03  # times the worth of no guesses: less is not worth the work
FIRST_REST, LONGEST_REST = 16, 1024  # turns without guesses before a retry
PROBE = 2  # guesses of a retry
QUIET = 0.2  # probability of disturbing another session below which a ring is not crowded
FULL = 0.3  # share of time for rows above which a hop has none for guesses: the passes take longer than their rows
OVER_S = 2.0  # of the measured load
FEW = 4  # other sessions with which a ring is not crowded, as far as is known before the first turn
SURE = 0.999  # the highest acceptance that is believed


class Crowd(NamedTuple):
    """Disturbance of other sessions by the passes of one session.

    Args:
        load: Share of a hop's time that rows take, between 0 and 1; 0 without other sessions.
        probability: Probability that another session is in the same passes, between 0 and 1.
        beside: Number of sessions in the same pass, on average.
        tokens_per_s: Tokens that all others lose if the passes of a turn take a second longer at each hop.
    """

    load: float
    probability: float
    beside: float
    tokens_per_s: float


class RowCost(NamedTuple):
    """Cost of a session's rows at the busiest hop of its route.

    Args:
        pass_s: Seconds of a pass, beside those of its positions.
        position_s: Seconds of each position.
        sharing: Number of other sessions in the passes.
        load: Share of the time that rows of all sessions take at the hop, between 0 and 1.
        hops: Seconds of a step on the whole route, in multiples of those at this hop.
        joined_s: Seconds that a second position adds to a step, beside `position_s`.
    """

    pass_s: float
    position_s: float
    sharing: int = 0
    load: float = 0.0
    hops: float = 1.0
    joined_s: float = 0.0

    @classmethod
    def of_speeds(
        cls,
        units: int,
        decode_units_per_s: float,
        prefill_units_per_s: float,
        pair_units_per_s: float = 0.0,
        *,
        sharing: int = 0,
    ) -> RowCost:
        """Return the cost of rows at a peer that computes `units` layers of the route with its announced speeds: FREE if it has
        announced none. Without the speed of pairs, a second position costs as much as each position of a prompt."""
        if decode_units_per_s <= 0 or prefill_units_per_s <= 0:
            return FREE
        step_s, position_s = units / decode_units_per_s, units / prefill_units_per_s
        position_s = min(step_s, position_s)
        pair_s = 2 * units / pair_units_per_s if pair_units_per_s > 0 else 0.0
        joined_s = max(0.0, pair_s - step_s - position_s)
        return cls(step_s - position_s, position_s, sharing, joined_s=joined_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step of one position."""
        return self.pass_s + self.position_s

    @property
    def rows_s(self) -> float:
        """Seconds of one position of each session."""
        return self.position_s * (1 + self.sharing)

    def in_turn(self, turn_s: float) -> Crowd:
        """Return the other sessions, in a ring whose least turn takes `turn_s` seconds. Each has at least a row in a turn."""
        load = min(1.0, max(self.load, self.rows_s / turn_s)) if self.sharing else 0.0
        probability = min(1.0, load * self.hops)
        return Crowd(load, probability, probability * self.sharing, load * self.hops * self.sharing / turn_s)

    def longer_s(self, guesses: int, crowd: Crowd) -> float:
        """Return the seconds that `guesses` guesses lengthen a pass at the hop, or that their own pass takes: x of this module's
        docstring."""
        filled_up = (1 + crowd.beside) * guesses * self.position_s
        return self.joined_s + min(filled_up, self.pass_s + guesses * self.position_s)


FREE = RowCost(0.0, 0.0)


def busiest(hops: Iterable[RowCost]) -> RowCost:
    """Return the cost at the hop where a row takes longest for all who wait, with the number of hops like that; FREE without
    hops."""
    known = list(hops)
    worst = max(known, key=lambda hop: hop.rows_s + hop.pass_s, default=FREE)
    return worst._replace(hops=sum(hop.step_s for hop in known) / worst.step_s) if worst.step_s else worst


class WindowChoice(NamedTuple):
    """A window of guesses, and its worth: the session's tokens/s, less those that others lose by its rows."""

    worth: float
    window: int


@dataclass
class Proposer:
    """Measured qualities of one proposer: the share of right guesses and the seconds of proposing one.

    A proposer without gain rests for `resting` turns, and for twice as many the next time. In a crowded ring it begins with
    `PROBE` guesses in flight. Each right one allows one more, so that a proposer that is not known yet does not crowd a ring.
    `best` is the window that was chosen last; None if a quality has changed since. `place` is where among `WINDOWS` the best one
    was found; None if the costs have changed since.
    """

    acceptance: float = EXPECTED
    guess_s: float = 0.0
    judged: int = 0
    allowed: int = PROBE
    resting: int = 0
    rest: int = FIRST_REST
    best: WindowChoice | None = None
    place: int | None = None

    def judge(self, right: bool) -> None:
        """Count one verdict. Early verdicts weigh more."""
        self.judged += 1
        self.allowed += right
        self.acceptance += max(KEPT, 1 / (self.judged + 2)) * (right - self.acceptance)
        self.best = None

    def took(self, guesses: int, seconds: float) -> None:
        """Note the seconds that proposing `guesses` tokens took."""
        self.guess_s += (0.25 if self.guess_s else 1.0) * (seconds / guesses - self.guess_s)


class MeasuredBudget:
    """Budget of one session's guesses, by proposer. `cost` returns the present cost of rows.

    A proposer without gain guesses no more. It tries again after a rest that doubles each time.
    """

    def __init__(self, cost: Callable[[], RowCost] = lambda: FREE, *, max_window: int = MAX_WINDOW) -> None:
        self._ask_cost = cost
        self._cost = cost()
        self._max_window = max_window
        self._windows = tuple(window for window in WINDOWS if window <= max_window)
        self._turn_s = 0.0
        self._least_turn_s = 0.0  # of late: about that of a ring whose hops do not queue
        self._cost_age_s = COST_S
        self._proposers: dict[str, Proposer] = {}

    def count(self, in_flight: int) -> int:
        """Return the number of guesses that may be sent now, while `in_flight` guesses have no verdict; 0 for none.

        Guesses go in batches of a window's `PASSES`th part, because each pass has its own cost.
        """
        window = self.window()
        room = window - in_flight
        return room if room > 0 and (room >= batch(window) or not in_flight) else 0

    def worthwhile(self, likely: Sequence[float]) -> int:
        """Return how many of the next guesses are worth their rows, if `likely` are their probabilities of being right; 0 for
        none. Before the first turn all are."""
        if not self._turn_s:
            return len(likely)
        cost, crowd = self._cost, self._crowd
        lost_per_s = cost.hops / self._turn_s + crowd.tokens_per_s  # tokens of this session and of others
        right = itertools.accumulate(likely, initial=0.0)
        gains = [
            tokens - lost_per_s * cost.longer_s(count, crowd) if count else 0.0 for count, tokens in enumerate(right)
        ]
        return max(range(len(gains)), key=gains.__getitem__)

    @property
    def _crowd(self) -> Crowd:
        return self._cost.in_turn(self._least_turn_s)

    def verdict(self, proposer: str, accepted: int, rejected: int) -> None:
        """Record that the last hop drew `accepted` guesses of `proposer`, and that `rejected` ones were computed in vain.

        Only the first of the rejected ones counts as wrong: the others followed it.
        """
        known = self.proposer(proposer)
        for right in (*(True,) * accepted, *(False,) * (rejected > 0)):
            known.judge(right)
        if self._best(known).window:
            known.rest = FIRST_REST
        elif not known.resting and (
            rejected or not self._best(replace(known, acceptance=1.0, best=None, place=None)).window
        ):
            known.resting, known.rest = known.rest, min(2 * known.rest, LONGEST_REST)
            known.allowed = PROBE

    def turn(self, took_s: float) -> None:
        """Record that the token of a position came back `took_s` seconds after the position was sent."""
        self._turn_s += (TURN_KEPT if self._turn_s else 1.0) * (took_s - self._turn_s)
        self._least_turn_s = min(took_s, TURN_DRIFT * self._least_turn_s) if self._least_turn_s else took_s
        self._cost_age_s += took_s
        for proposer in self._proposers.values():
            proposer.resting = max(0, proposer.resting - 1)
        if self._cost_age_s >= COST_S:
            self._cost, self._cost_age_s = self._ask_cost(), 0.0
            for proposer in self._proposers.values():
                proposer.best = proposer.place = None

    def proposer(self, name: str) -> Proposer:
        """Return the measured qualities of a proposer."""
        return self._proposers.setdefault(name, Proposer())

    def window(self, name: str | None = None) -> int:
        """Return how many guesses a proposer may have in flight, by default the best one: 0 while it rests."""
        known = [self.proposer(name)] if name is not None else [*self._proposers.values()] or [Proposer()]
        return max(min(self._best(one).window or PROBE, self._allowed(one)) for one in known)

    def _allowed(self, proposer: Proposer) -> int:
        """Return the most guesses that a proposer may have in flight yet: in a crowded ring few until it has proved itself, and
        none at a full hop or before a turn was measured."""
        if proposer.resting:
            return 0
        if not self._turn_s:
            return 0 if self._cost.sharing > FEW else self._max_window
        crowd = self._crowd
        if crowd.load > FULL:
            return 0
        return min(proposer.allowed, self._max_window) if crowd.probability > QUIET else self._max_window

    def worth(self, name: str) -> float:
        """Return the tokens/s that this proposer's best window brings, less those that other sessions lose."""
        return self._best(self.proposer(name)).worth

    def _best(self, proposer: Proposer) -> WindowChoice:
        """Return the window that is worth most: 0 if guessing gains too little."""
        if proposer.best is None:
            proposer.best = self._choose(proposer)
        return proposer.best

    def _choose(self, proposer: Proposer) -> WindowChoice:
        turn_s = self._turn_s
        if not turn_s:
            return WindowChoice(0.0, min(PROBE * PASSES, self._max_window))
        forecast = partial(worth, proposer=proposer, turn_s=turn_s, cost=self._cost, crowd=self._crowd)
        places = range(len(self._windows))
        if proposer.place is not None:  # one verdict moves the best window by a step at most
            places = places[max(0, proposer.place - 1) : proposer.place + 2]
        best, proposer.place = max(
            (WindowChoice(forecast(self._windows[place]), self._windows[place]), place) for place in places
        )
        return best if best.worth * turn_s > LEAST_GAIN else WindowChoice(1 / turn_s, 0)


def batch(window: int) -> int:
    """Return the number of guesses that are sent together."""
    return -(-window // PASSES)


def token_s(window: int, proposer: Proposer, turn_s: float, cost: RowCost, crowd: Crowd) -> float:
    """Return the expected seconds of a token with `window` guesses in flight: T of this module's docstring, for a window of at
    least 1."""
    right, together = min(proposer.acceptance, SURE), batch(window)
    row_s = cost.position_s + cost.pass_s / together
    long_s = turn_s + cost.hops * cost.longer_s(together, crowd)
    in_vain_s = (window - together) * cost.position_s
    all_right = right ** (window + 1)
    run_s = (1 - right) * long_s * all_right / (1 - all_right)
    wrong_s = (1 - right) * (long_s + together * proposer.guess_s + in_vain_s)
    return wrong_s + max(run_s, right * row_s, right * proposer.guess_s)


def worth(window: int, proposer: Proposer, turn_s: float, cost: RowCost, crowd: Crowd) -> float:
    """Return the tokens/s of a session with `window` guesses in flight, less those that others lose by its additional rows: W of
    this module's docstring."""
    together = batch(window)
    tokens_per_s = 1 / token_s(window, proposer, turn_s, cost, crowd)
    rows_per_s = tokens_per_s * (1 + (1 - min(proposer.acceptance, SURE)) * window)
    lost_per_row = crowd.tokens_per_s * cost.longer_s(together, crowd) / together
    return tokens_per_s - lost_per_row * max(0.0, rows_per_s - 1 / turn_s)


class RowLoad:
    """Share of a device's time that rows take, over about the last `OVER_S` seconds; the fixed part of passes does not count, as
    more rows share it."""

    def __init__(self) -> None:
        self._share = 0.0
        self._until_s = 0.0

    def record(self, ended_s: float, rows_s: float) -> None:
        """Record that a pass ended at `ended_s`, of which rows took `rows_s` seconds."""
        self._share = self.share(ended_s) + rows_s / OVER_S
        self._until_s = ended_s

    def share(self, now_s: float) -> float:
        """Return the share at the time `now_s`, between 0 and 1."""
        return min(1.0, self._share * math.exp(-max(0.0, now_s - self._until_s) / OVER_S))
