"""Number of guessed positions that a session keeps in flight, from measured acceptance, turns of the ring and costs of rows.

Let a be the share of guesses that are right, R the seconds of a turn, and d the seconds of proposing a guess. With w guesses in
flight, b go together, and c = p + f / b are the seconds of one more row at the busiest hop (p for a position, f for a pass).
Then a token takes

    T(w) = (1 - a) (R + b d + w p)  +  max((1 - a) R a^(w + 1) / (1 - a^(w + 1)),  a c,  a d)

A wrong guess costs a turn, and behind it guesses are computed in vain. Every w + 1 right guesses in a row take one more turn,
unless rows cannot be computed or proposed that fast. T(0) = R.

Rows take time from other sessions. At a full hop each computed row is a row less for the others. If the busiest hop computes rows
of others during a share u of its time, one more row takes about u tokens from them. So the window is the w with the most

    W(w) = 1 / T(w)  -  u ((1 + (1 - a) w) / T(w) - 1 / R)

It is 0 if that is hardly more than without guesses, and at a full hop: guesses go last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_WINDOW = 32  # guesses in flight at most
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # that are compared
PASSES = 4  # that carry the guesses of a session, one behind the other
KEPT, TURN_KEPT = 1 / 24, 1 / 8  # weight of a new verdict, and of a new turn
TURN_DRIFT = 1.005  # by which the least turn grows with each turn, until a new least one comes
EXPECTED = 0.7  # acceptance of a proposer before its first verdicts
LEAST_GAIN = 1.03  # times the worth of no guesses: less is not worth the work
FIRST_REST, LONGEST_REST = 16, 1024  # turns without guesses before a retry
PROBE = 2  # guesses of a retry
UNEQUAL = 2.0  # times the load that is known here: another hop may be busier, and passes take longer than their rows
QUIET = 0.2  # share of time for rows below which a ring is not crowded
FULL = 0.9  # share above which a hop has no time for guesses
OVER_S = 2.0  # of the measured load
FEW = 4  # other sessions with which a ring is not crowded, as far as is known before the first turn
SURE = 0.999  # the highest acceptance that is believed


class RowCost(NamedTuple):
    """Cost of a session's rows at the busiest hop of its route.

    Args:
        pass_s: Seconds of a pass, beside those of its positions.
        position_s: Seconds of each position.
        sharing: Number of other sessions in the passes.
        load: Share of the time that rows of all sessions take at the hop, as it is measured, between 0 and 1.
    """

    pass_s: float
    position_s: float
    sharing: int = 0
    load: float = 0.0

    @classmethod
    def of_speeds(cls, units: int, decode_units_per_s: float, prefill_units_per_s: float, sharing: int = 0) -> RowCost:
        """Return the cost of rows at a peer that computes `units` layers of the route with its announced speeds; FREE if it has
        announced none."""
        if decode_units_per_s <= 0 or prefill_units_per_s <= 0:
            return FREE
        step_s, position_s = units / decode_units_per_s, units / prefill_units_per_s
        return cls(max(0.0, step_s - position_s), min(step_s, position_s), sharing)

    def crowding(self, turn_s: float) -> float:
        """Return the share of the time that the hop computes rows of other sessions: as measured, at least a row of each in a
        turn. All sessions count as equally busy."""
        rows = max(self.load, (1 + self.sharing) * self.position_s / turn_s)
        return min(1.0, UNEQUAL * rows) * self.sharing / (1 + self.sharing)


FREE = RowCost(0.0, 0.0)


def busiest(hops: Iterable[RowCost]) -> RowCost:
    """Return the cost at the hop where a row takes longest for all who wait; FREE without hops."""
    return max(hops, key=lambda hop: hop.position_s * (1 + hop.sharing) + hop.pass_s, default=FREE)


class WindowChoice(NamedTuple):
    """A window of guesses, and its worth: the session's tokens/s, less those that others lose by its rows."""

    worth: float
    window: int


@dataclass
class Proposer:
    """Measured qualities of one proposer: the share of right guesses and the seconds of proposing one.

    A proposer without gain rests for `resting` turns, and for twice as many the next time. In a crowded ring it begins with
    `PROBE` guesses in flight. Each right one allows one more, so that a proposer that is not known yet does not crowd a ring.
    """

    acceptance: float = EXPECTED
    guess_s: float = 0.0
    judged: int = 0
    allowed: int = PROBE
    resting: int = 0
    rest: int = FIRST_REST

    def judge(self, right: bool) -> None:
        """Count one verdict. Early verdicts weigh more."""
        self.judged += 1
        self.allowed += right
        self.acceptance += max(KEPT, 1 / (self.judged + 2)) * (right - self.acceptance)

    def took(self, guesses: int, seconds: float) -> None:
        """Note the seconds that proposing `guesses` tokens took."""
        self.guess_s += (0.25 if self.guess_s else 1.0) * (seconds / guesses - self.guess_s)

    def begin_rest(self) -> None:
        """Rest from now on."""
        self.resting, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)
        self.allowed = PROBE


class MeasuredBudget:
    """Budget of one session's guesses, by proposer. `cost` returns the present cost of rows.

    A proposer without gain guesses no more. It tries again after a rest that doubles each time.
    """

    def __init__(self, cost: Callable[[], RowCost] = lambda: FREE, *, max_window: int = MAX_WINDOW) -> None:
        self._cost = cost
        self._max_window = max_window
        self._turn_s = 0.0
        self._least_turn_s = 0.0  # of late: about that of a ring whose hops do not queue
        self._proposers: dict[str, Proposer] = {}

    def __repr__(self) -> str:
        known = ", ".join(f"{name} {one.acceptance:.2f}" for name, one in self._proposers.items())
        return f"<MeasuredBudget of {self.window()} guesses, a turn of {self._turn_s * 1e3:.1f} ms, {known or 'none judged'}>"

    def count(self, in_flight: int) -> int:
        """Return the number of guesses that may be sent now, while `in_flight` guesses have no verdict; 0 for none.

        Guesses go in batches of a window's `PASSES`th part, because each pass has its own cost.
        """
        window = self.window()
        room = window - in_flight
        return room if room > 0 and (room >= batch(window) or not in_flight) else 0

    def verdict(self, proposer: str, accepted: int, rejected: int) -> None:
        """Record that the last hop drew `accepted` guesses of `proposer`, and that `rejected` ones were computed in vain.

        Only the first of the rejected ones counts as wrong: the others followed it.
        """
        known = self.proposer(proposer)
        for right in (*(True,) * accepted, *(False,) * (rejected > 0)):
            known.judge(right)
        if self._best(known).window:
            known.rest = FIRST_REST
        elif not known.resting and (rejected or not self._best(replace(known, acceptance=1.0)).window):
            known.begin_rest()

    def turn(self, took_s: float) -> None:
        """Record that the token of a position came back `took_s` seconds after the position was sent."""
        self._turn_s += (TURN_KEPT if self._turn_s else 1.0) * (took_s - self._turn_s)
        self._least_turn_s = min(took_s, TURN_DRIFT * self._least_turn_s) if self._least_turn_s else took_s
        for proposer in self._proposers.values():
            proposer.resting = max(0, proposer.resting - 1)

    def proposer(self, name: str) -> Proposer:
        """Return the measured qualities of a proposer."""
        return self._proposers.setdefault(name, Proposer())

    def window(self, name: str | None = None) -> int:
        """Return how many guesses a proposer may have in flight, by default the best one: 0 while it rests."""
        known = [self.proposer(name)] if name is not None else [*self._proposers.values()] or [Proposer()]
        return max(min(self._best(one).window or PROBE, self._allowed(one)) for one in known)

    def _allowed(self, proposer: Proposer) -> int:
        """Return the most guesses that a proposer may have in flight yet: in a crowded ring few until it has proved itself.
        None at a full hop, and none before a turn was measured."""
        if proposer.resting:
            return 0
        cost = self._cost()
        if not self._turn_s:
            return 0 if cost.sharing > FEW else self._max_window
        crowding = cost.crowding(self._least_turn_s)
        if crowding > FULL:
            return 0
        return min(proposer.allowed, self._max_window) if crowding > QUIET else self._max_window

    def worth(self, name: str) -> float:
        """Return the tokens/s that this proposer's best window brings, less those that other sessions lose."""
        return self._best(self.proposer(name)).worth

    def _best(self, proposer: Proposer) -> WindowChoice:
        """Return the window that is worth most: 0 if guessing gains too little."""
        turn_s = self._turn_s
        if not turn_s:
            return WindowChoice(0.0, min(PROBE * PASSES, self._max_window))
        cost = self._cost()
        crowding = cost.crowding(self._least_turn_s)
        windows = (window for window in WINDOWS if window <= self._max_window)
        best = max(WindowChoice(worth(window, proposer, turn_s, cost, crowding), window) for window in windows)
        return best if best.worth * turn_s > LEAST_GAIN else WindowChoice(1 / turn_s, 0)


def batch(window: int) -> int:
    """Return the number of guesses that are sent together."""
    return -(-window // PASSES)


def token_s(window: int, proposer: Proposer, turn_s: float, cost: RowCost) -> float:
    """Return the expected seconds of a token with `window` guesses in flight: T of this module's docstring, for a window of at
    least 1."""
    right, together = min(proposer.acceptance, SURE), batch(window)
    row_s = cost.position_s + cost.pass_s / together
    in_vain_s = window * cost.position_s
    all_right = right ** (window + 1)
    run_s = (1 - right) * turn_s * all_right / (1 - all_right)
    wrong_s = (1 - right) * (turn_s + together * proposer.guess_s + in_vain_s)
    return wrong_s + max(run_s, right * row_s, right * proposer.guess_s)


def worth(window: int, proposer: Proposer, turn_s: float, cost: RowCost, crowding: float) -> float:
    """Return the tokens/s of a session with `window` guesses in flight, less those that others lose by its additional rows: W of
    this module's docstring, with a `crowding` u."""
    tokens_per_s = 1 / token_s(window, proposer, turn_s, cost)
    rows_per_s = tokens_per_s * (1 + (1 - min(proposer.acceptance, SURE)) * window)
    return tokens_per_s - crowding * (rows_per_s - 1 / turn_s)


class RowLoad:
    """Share of a device's time that rows take, over about the last `OVER_S` seconds; the fixed part of passes does not count, as
    more rows share it."""

    def __init__(self) -> None:
        self._share = 0.0
        self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<RowLoad {self._share:.2f}>"

    def note(self, ended_s: float, rows_s: float) -> None:
        """Record that a pass ended at `ended_s`, of which rows took `rows_s` seconds."""
        self._share = self.share(ended_s) + rows_s / OVER_S
        self._until_s = ended_s

    def share(self, now_s: float) -> float:
        """Return the share at the time `now_s`, between 0 and 1."""
        return min(1.0, self._share * math.exp(-max(0.0, now_s - self._until_s) / OVER_S))
