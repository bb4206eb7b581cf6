"""Answer times: how long a coordinator waits for each kind of answer, from the time that earlier answers took."""

from __future__ import annotations

from collections import defaultdict

from swarmnode.codec.frames import FrameKind
from swarmnode.net.deadlines import Deadline, Expectation

SILENCE_S = 5.0  # without a word of a coordinator, which sends one each second
STALLED_S = 60.0  # without any work, while there are trainers and every unit has a holder
SAVE_S = 120.0  # for a step of gigabytes to be written to a slow disk
CLEANUP = 2.0  # times a lease's deadline, after which a hop forgets the lease by itself: its coordinator is gone, too
STATES = Deadline(floor_s=10.0, ceiling_s=600.0)  # gigabytes are loaded or written
ROUND = Deadline(floor_s=5.0, ceiling_s=900.0)
RULES = {
    FrameKind.BEGIN: (30.0, STATES),
    FrameKind.RESTORE: (30.0, STATES),
    FrameKind.COMMIT: (30.0, Deadline(floor_s=5.0, ceiling_s=600.0)),
    FrameKind.REDUCE: (15.0, ROUND),
    FrameKind.LEASE: (15.0, ROUND),
}
"""Expected seconds while nothing is measured, and the deadline rule, by kind of command."""

ANSWER = (5.0, Deadline(floor_s=3.0, ceiling_s=300.0))  # any other command: it is done after the pass under way


class AnswerTimes:
    """Times of the answers of one peer, or (for all-reduces and leases) of all peers together."""

    def __init__(self) -> None:
        self._taken: defaultdict[FrameKind, Expectation] = defaultdict(Expectation)
        self._stretch: defaultdict[FrameKind, float] = defaultdict(lambda: 1.0)

    def __repr__(self) -> str:
        return f"<AnswerTimes {dict(self._taken)}>"

    def note(self, kind: FrameKind, seconds: float) -> None:
        """Record that an answer of this kind took `seconds`. Ends the stretching of its deadline."""
        self._taken[kind].note(seconds)
        self._stretch[kind] = 1.0

    def stretch(self, kind: FrameKind) -> None:
        """Double the next deadlines of this kind after an answer that was late without anyone's fault, so that slow work is
        done, too."""
        self._stretch[kind] *= 2

    def wait_s(self, kind: FrameKind, *, rtt_s: float = 0.0, work_s: float = 0.0) -> float:
        """Return the seconds to wait for an answer. `work_s` is known computing time before the answer."""
        unmeasured_s, rule = RULES.get(kind, ANSWER)
        taken_s = self._taken[kind].bound
        usual_s = unmeasured_s if taken_s is None else taken_s
        return rule.wait_s(rtt_s=rtt_s, work_s=max(usual_s, work_s)) * self._stretch[kind]
