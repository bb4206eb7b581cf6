"""Whether what was given to the compute thread comes back: its loop may answer every PING while its device stands still.

A hop watches its own computing, since it alone knows what waits and what a pass took so far. Pure: the server brings the time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from swarmnode.net.deadlines import Deadline, Expectation

STALLED = Deadline(floor_s=3.0, ceiling_s=30.0, slack=4.0)  # of one pass; the longest where nothing was measured


class Running(NamedTuple):
    """What a compute thread does: for how many seconds by now, and whether it is for sessions."""

    seconds: float
    serving: bool


class ComputeWatch:
    """Of one stage. It stands still when something waits and no pass ended for far longer than passes take.

    Passes are expected to take as long as those of their kind did, a prompt's for each of its positions.
    """

    def __init__(self, deadline: Deadline = STALLED) -> None:
        self._deadline = deadline
        self._waiting: dict[
            int, tuple[int, int]
        ] = {}  # by session: the end of what waits, positions of its longest job
        self._moved_at_s = 0.0
        self._position_s: defaultdict[bool, Expectation] = defaultdict(
            Expectation
        )  # by whether a pass is a decode step

    def __repr__(self) -> str:
        return f"<ComputeWatch of {len(self._waiting)} sessions, moved at {self._moved_at_s:.1f} s>"

    def expect(self, *, step_s: float, position_s: float) -> None:
        """What was measured before the first session came: of a decode step, and of each position of a prompt."""
        self._position_s[True].note(step_s)
        self._position_s[False].note(position_s)

    @property
    def waiting(self) -> frozenset[int]:
        """The sessions for which something is to be computed."""
        return frozenset(self._waiting)

    def submitted(self, session: int, end: int, count: int, now_s: float) -> None:
        """Positions [end - count, end) of a session wait to be computed."""
        if not self._waiting:
            self._moved_at_s = now_s
        longest = self._waiting.get(session, (0, 0))[1]
        self._waiting[session] = (end, max(longest, count))

    def computed(self, session: int, end: int, count: int, took_s: float, now_s: float) -> None:
        """A pass brought a session to position `end`, with `count` new ones."""
        self._moved_at_s = now_s
        self._position_s[count == 1].note(took_s / count)
        if end >= self._waiting.get(session, (0, 0))[0]:
            self._waiting.pop(session, None)

    def forget(self, session: int) -> None:
        """Nobody waits for this session any more."""
        self._waiting.pop(session, None)

    def stalled(self, now_s: float, running: Running | None) -> bool:
        """Whether it stands still. `running` is what the thread does: of work that is not the sessions', or of none although
        some waits, nothing is known here."""
        if not self._waiting:
            return False
        waited_s, work_s = now_s - self._moved_at_s, None
        if running is not None:
            waited_s = min(waited_s, running.seconds)
            work_s = self._expected_s() if running.serving else None
        return waited_s > self._deadline.wait_s(rtt_s=0.0, work_s=work_s)

    def _expected_s(self) -> float | None:
        """What the longest pass among those that wait should take; None where none of its kind was seen."""
        times_s: list[float] = []
        for _, count in self._waiting.values():
            position_s = self._position_s[count == 1].bound
            if position_s is None:
                return None
            times_s.append(position_s * count)
        return max(times_s)
