"""AnswerTimes: how long a coordinator waits for what it asked of whom, by how long it took them so far."""

from __future__ import annotations

from collections import defaultdict

from swarmnode.codec.frames import FrameKind
from swarmnode.net.deadlines import Deadline, Expectation

SILENCE_S = 5.0  # without a word of a coordinator, which says something each second
STALLED_S = 60.0  # without any work, while there are trainers and somebody holds every unit
SAVE_S = 120.0  # for a step of gigabytes to be written to a slow disk
CLEANUP = 2.0  # times a lease's deadline after which a hop forgets it on its own: its coordinator is gone, too
STATES = Deadline(floor_s=10.0, ceiling_s=600.0)  # of gigabytes are loaded or written down
ROUND = Deadline(floor_s=5.0, ceiling_s=900.0)
RULES = {
    FrameKind.BEGIN: (30.0, STATES),
    FrameKind.RESTORE: (30.0, STATES),
    FrameKind.COMMIT: (30.0, Deadline(floor_s=5.0, ceiling_s=600.0)),
    FrameKind.REDUCE: (15.0, ROUND),
    FrameKind.LEASE: (15.0, ROUND),
}
"""Of a kind the seconds that it is expected to take while nothing was measured, and the rule"""

ANSWER = (5.0, Deadline(floor_s=3.0, ceiling_s=300.0))  # any other command: done after the pass that is being computed


class AnswerTimes:
    """With one peer, or (for all-reduces and leases) with all of them together."""

    def __init__(self) -> None:
        self._taken: defaultdict[FrameKind, Expectation] = defaultdict(Expectation)
        self._stretch: defaultdict[FrameKind, float] = defaultdict(lambda: 1.0)

    def __repr__(self) -> str:
        return f"<AnswerTimes {dict(self._taken)}>"

    def note(self, kind: FrameKind, seconds: float) -> None:
        """It was done, and took so long."""
        self._taken[kind].note(seconds)
        self._stretch[kind] = 1.0

    def stretch(self, kind: FrameKind) -> None:
        """It was too late, and nobody is to blame: wait twice as long the next time, so that slow work is done, too."""
        self._stretch[kind] *= 2

    def wait_s(self, kind: FrameKind, *, rtt_s: float = 0.0, work_s: float = 0.0) -> float:
        """Seconds to wait for it. `work_s`: of computing that is known to come before the answer."""
        unmeasured_s, rule = RULES.get(kind, ANSWER)
        taken_s = self._taken[kind].bound
        usual_s = unmeasured_s if taken_s is None else taken_s
        return rule.wait_s(rtt_s=rtt_s, work_s=max(usual_s, work_s)) * self._stretch[kind]
