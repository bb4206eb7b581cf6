"""Number of guessed positions that a session keeps in flight, from measured acceptance, turns of the ring and costs of rows.

Let a be the share of guesses that are right, R the seconds of a turn, and d the seconds of proposing a guess. With w guesses in
flight, b go together, and c = p + f / b are the seconds of one more row at the busiest hop (p for a position, f for a pass).
Then a token takes

    T(w) = (1 - a) (R + b d + w p (1 + s))  +  max((1 - a) R a^(w + 1) / (1 - a^(w + 1)),  a c,  a d)

A wrong guess costs a turn. Behind it guesses are computed in vain, and the s sessions that share the hop's passes wait for them,
too. Every w + 1 right guesses in a row take one more turn, unless rows cannot be computed or proposed that fast. T(0) = R. The
window is the w with the least T. It is 0 if guessing does not make a session faster, or if others lose more by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

MAX_WINDOW = 32  # guesses in flight at most
WINDOWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32)  # that are compared
PASSES = 4  # that carry the guesses of a session, one behind the other
KEPT, TURN_KEPT = 1 / 24, 1 / 8  # weight of a new verdict, and of a new turn
EXPECTED = 0.7  # acceptance of a proposer before its first verdicts
LEAST_GAIN = 0.97  # of a plain turn: a window that is not better than that is not worth its work
FIRST_REST, LONGEST_REST = 16, 1024  # turns without guesses before a retry
PROBE = 2  # guesses of a retry
SURE = 0.999  # the highest acceptance that is believed


class RowCost(NamedTuple):
    """Cost of a session's rows at the busiest hop of its route.

    Args:
        pass_s: Seconds of a pass, beside those of its positions.
        position_s: Seconds of each position.
        sharing: Number of other sessions in the passes.
    """

    pass_s: float
    position_s: float
    sharing: int = 0

    @classmethod
    def of_speeds(cls, units: int, decode_units_per_s: float, prefill_units_per_s: float, sharing: int = 0) -> RowCost:
        """Return the cost of rows at a peer that computes `units` layers of the route with its announced speeds; FREE if it has
        announced none."""
        if decode_units_per_s <= 0 or prefill_units_per_s <= 0:
            return FREE
        step_s, position_s = units / decode_units_per_s, units / prefill_units_per_s
        return cls(max(0.0, step_s - position_s), min(step_s, position_s), sharing)

    @property
    def step_s(self) -> float:
        """Seconds of a pass over one position."""
        return self.pass_s + self.position_s


FREE = RowCost(0.0, 0.0)


def busiest(hops: Iterable[RowCost]) -> RowCost:
    """Return the cost at the hop where a row takes longest for all who wait; FREE without hops."""
    return max(hops, key=lambda hop: hop.position_s * (1 + hop.sharing) + hop.pass_s, default=FREE)


class Choice(NamedTuple):
    """A window of guesses, and the expected seconds of a token with it."""

    token_s: float
    window: int


@dataclass
class Proposer:
    """Measured qualities of one proposer: the share of right guesses and the seconds of proposing one.

    A proposer without gain rests for `resting` turns, and for twice as many the next time.
    """

    acceptance: float = EXPECTED
    guess_s: float = 0.0
    judged: int = 0
    resting: int = 0
    rest: int = FIRST_REST

    def judge(self, right: bool) -> None:
        """Count one verdict. Early verdicts weigh more."""
        self.judged += 1
        self.acceptance += max(KEPT, 1 / (self.judged + 2)) * (right - self.acceptance)

    def took(self, guesses: int, seconds: float) -> None:
        """Note the seconds that proposing `guesses` tokens took."""
        self.guess_s += (0.25 if self.guess_s else 1.0) * (seconds / guesses - self.guess_s)

    def begin_rest(self) -> None:
        """Rest from now on."""
        self.resting, self.rest = self.rest, min(2 * self.rest, LONGEST_REST)


class MeasuredBudget:
    """Budget of one session's guesses, by proposer. `cost` returns the present cost of rows.

    A proposer without gain guesses no more. It tries again after a rest that doubles each time.
    """

    def __init__(self, cost: Callable[[], RowCost] = lambda: FREE, *, max_window: int = MAX_WINDOW) -> None:
        self._cost = cost
        self._max_window = max_window
        self._turn_s = 0.0
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
        for proposer in self._proposers.values():
            proposer.resting = max(0, proposer.resting - 1)

    def proposer(self, name: str) -> Proposer:
        """Return the measured qualities of a proposer."""
        return self._proposers.setdefault(name, Proposer())

    def window(self, name: str | None = None) -> int:
        """Return how many guesses a proposer may have in flight, by default the best one: 0 while it rests."""
        known = [self.proposer(name)] if name is not None else [*self._proposers.values()] or [Proposer()]
        probe = min(PROBE, self._max_window)
        return max(0 if one.resting else self._best(one).window or probe for one in known)

    def trust(self, name: str) -> None:
        """Expect all guesses of a proposer to be right, until verdicts say otherwise."""
        self.proposer(name).acceptance = 1.0

    def token_s(self, name: str) -> float:
        """Return the seconds that a token should take with this proposer's best window."""
        return self._best(self.proposer(name)).token_s

    def _best(self, proposer: Proposer) -> Choice:
        """Return the window that takes the least time for a token: 0 if guessing gains too little."""
        if not self._turn_s:
            return Choice(0.0, min(PROBE * PASSES, self._max_window))
        cost = self._cost()
        windows = (window for window in WINDOWS if window <= self._max_window)
        best = min(Choice(token_s(window, proposer, self._turn_s, cost), window) for window in windows)
        return best if best.token_s < LEAST_GAIN * self._turn_s else Choice(self._turn_s, 0)


def batch(window: int) -> int:
    """Return the number of guesses that are sent together."""
    return -(-window // PASSES)


def token_s(window: int, proposer: Proposer, turn_s: float, cost: RowCost) -> float:
    """Return the expected seconds of a token with `window` guesses in flight: T of this module's docstring, for a window of at
    least 1."""
    right, together = min(proposer.acceptance, SURE), batch(window)
    row_s = cost.position_s + cost.pass_s / together
    in_vain_s = window * cost.position_s * (1 + cost.sharing)
    all_right = right ** (window + 1)
    run_s = (1 - right) * turn_s * all_right / (1 - all_right)
    wrong_s = (1 - right) * (turn_s + together * proposer.guess_s + in_vain_s)
    return wrong_s + max(run_s, right * row_s, right * proposer.guess_s)
