"""Fair shares of a device: who asks for much slows itself, and not who asks for little.

    open(session, owner) -> arrive(session, ...) -> steps(...), ahead_s(...) before each pass -> charge(counts) for it

Owners are whoever sessions are for: a peer, or an address group of the open internet. Each has a counter of the time that its
positions took (VTC, Sheng et al., arXiv 2401.00588), over its weight: who has credit may have a larger one. Who arrives has at
least as much as the least of those who are there, so that nobody saves up. Who is ahead of the least by more than a prompt takes is
held back (`scheduler.py`). Where nobody knows for whom a session is, it counts by itself and is never held back: its first hop has
seen to that.

Of steps, owners that have many sessions may add to a pass what lengthens it by half for the others, and as many as others have in
any case: max-min shares of rows, of which every session of an owner has its turn.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from swarmnode.plan.serving.pass_cost import PassCost

SLOWDOWN = 1.5  # of a pass, by those who have most
ALLOWED_POSITIONS = 512  # by which one may be ahead: a prompt
MAX_OWNERS = 1024  # that are remembered

Owner = str | int
"""A name, or the number of a session that has none"""


class DeviceShares:
    """Who has had how much of one device."""

    def __init__(self, cost: PassCost) -> None:
        self._cost = cost
        self._owners: dict[int, Owner] = {}  # of open sessions that have one
        self._weights: dict[int, float] = {}  # of open sessions that have an owner
        self._used_s: dict[Owner, float] = {}  # the one that was charged last stands last

    def __repr__(self) -> str:
        return f"<DeviceShares of {len(self._owners)} sessions, {len(self._used_s)} owners>"

    def open(self, session: int, owner: str, weight: float = 1.0) -> None:
        """From now on what the session takes is charged to this owner, and counts as so many times less."""
        self._owners[session] = owner
        self._weights[session] = weight

    def close(self, session: int) -> None:
        """The session is over. What its owner had is remembered."""
        self._used_s.pop(session, None)
        self._owners.pop(session, None)
        self._weights.pop(session, None)

    def arrive(self, session: int, present: Iterable[int]) -> None:
        """More of a session waits; these other sessions are there."""
        owner, there = self._owner(session), {self._owner(other) for other in present}
        if owner not in there:
            least_s = min((self._used_s.get(other, 0.0) for other in there), default=0.0)
            self._set(owner, max(self._used_s.get(owner, 0.0), least_s))

    def charge(self, counts: Mapping[int, int]) -> None:
        """These positions of these sessions make one pass, all rows filled up to the longest."""
        each_s = self._cost.seconds(len(counts) * max(counts.values())) / sum(counts.values())
        for session, count in counts.items():
            owner = self._owner(session)
            self._set(owner, self._used_s.get(owner, 0.0) + count * each_s / self._weights.get(session, 1.0))

    def _set(self, owner: Owner, used_s: float) -> None:
        self._used_s.pop(owner, None)
        self._used_s[owner] = used_s
        if len(self._used_s) > MAX_OWNERS:
            del self._used_s[next(iter(self._used_s))]

    def _owner(self, session: int) -> Owner:
        return self._owners.get(session, session)

    def ahead_s(self, sessions: Iterable[int], present: Iterable[int]) -> dict[int, float]:
        """By how much the owners of these sessions have had more than the one that has had least of all that are there."""
        least_s = min(
            (self._used_s.get(owner, 0.0) for owner in {self._owner(other) for other in present}), default=0.0
        )
        return {
            session: self._used_s.get(self._owners[session], 0.0) - least_s if session in self._owners else 0.0
            for session in sessions
        }

    @property
    def allowed_s(self) -> float:
        """By how much one may be ahead and not be held back."""
        return self._cost.seconds(ALLOWED_POSITIONS)

    def of_others(self, sessions: Iterable[int], session: int) -> list[int]:
        """Those of the sessions that are not of the same owner as `session`."""
        return [other for other in sessions if self._owner(other) != self._owner(session)]

    def steps(self, waiting: Sequence[int], decoding: Collection[int]) -> list[int]:
        """Which of the sessions whose steps wait, in the order of their turns, go into a pass while these decode."""
        rows = Counter(self._owner(session) for session in {*waiting, *decoding})
        most = self._rows_of_owner(list(rows.values()))
        taken: Counter[Owner] = Counter()
        steps = []
        for session in waiting:
            owner = self._owner(session)
            taken[owner] += 1
            if taken[owner] <= most:
                steps.append(session)
        return steps

    def _rows_of_owner(self, rows: Sequence[int]) -> int:
        """The most that one owner may have in a pass, where all together want so many."""
        most, usual = max(rows, default=0), statistics.median_low(rows) if rows else 0
        if usual == most or not self._cost.position_s:
            return most
        fit = self._cost.positions(SLOWDOWN * self._cost.seconds(sum(count for count in rows if count <= usual)))
        return next((more for more in range(most, usual, -1) if sum(min(count, more) for count in rows) <= fit), usual)
