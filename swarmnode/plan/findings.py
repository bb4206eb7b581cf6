"""Findings about peers, and the rule that decides from them whether to use, avoid, doubt, shun or report a peer.

A finding is one observation of one peer: its kind, time, weight and evidence. Sessions, audits, trainings, tunings and passes
through modules add findings to the record (`peer/findings_record.py`). `why`, `status`, the page and the metrics read it. The
rule is the pure function `after`. Its numbers are in `tolerances.py`.

Findings of one kind add up. Positions found right raise trust, which fades within days. Near misses over several texts, or
contradictions with several peers, get a peer shunned as one false result does. A failure makes a peer rest for a while, and says
nothing of its honesty.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import msgspec

from swarmnode import tolerances

LATEST = 8  # findings of a peer that are kept for people, the last one of each kind


class Kind(str, Enum):
    """Kind of a finding."""

    RIGHT = "right"  # `weight` positions were found right
    NEAR = "near miss"  # of `weight` positions one or more are nearly too far off; `other`: digest of the text, in hex
    UNCLEAR = "unclear near miss"  # that may be another peer's
    SILENT = "silent"  # it did not account for its work, which may not be its fault
    CONTRADICTION = "contradiction"  # to `other` (a peer or a text), where one of the two is wrong
    FALSE = "false"  # it computed falsely, as a third peer or this machine's own computation shows
    OUTLYING = "outlying"  # its gradients are unlike the others': a vote, which the majority of members decides
    LEFT_OUT = "left out"  # of a training, by its coordinator, for now or for good
    FAILED = "failed"  # it was lost, or answered with an error to what others could do


class PeerAction(str, Enum):
    """Decision about a peer, as the page shows it."""

    USE = "good"
    DOUBT = "doubted"
    SHUN = "shunned"


class PeerFinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Finding of a `kind` (a value of `Kind`; later versions may have others) at unix time `at`. `other` is the other side of a
    contradiction, or the digest of a text. `evidence` is a sentence for people."""

    kind: str
    at: float
    weight: float = 1.0
    other: str = ""
    evidence: str = ""


class PeerStanding(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sum of all findings about a peer: `passed` positions as of unix time `at`, and `doubts` (the other side, and when).

    `near_misses` counts texts that deviated a little too much, in `audited` positions; both as of `at`. `near_texts` are digests of
    the latest of these texts, `findings` the last finding of each kind, for people. `proved`: whether the last finding that got
    it shunned was FALSE.
    """

    passed: float = 0.0
    at: float = 0.0
    shunned_until: float = 0.0
    doubts: dict[str, float] = {}
    near_misses: float = 0.0
    audited: float = 0.0
    near_texts: tuple[bytes, ...] = ()
    findings: tuple[PeerFinding, ...] = ()
    proved: bool = False

    def fading(self, now: float) -> float:
        """Return the remaining share of the counts at unix time `now`."""
        return float(0.5 ** max(0.0, (now - self.at) / tolerances.HALF_LIFE_S))

    def sentences(self) -> list[str]:
        """Return a sentence for each kept finding, the last one of each kind, the latest at the end."""
        return [f"{found.kind}: {found.evidence}" for found in self.findings]

    def action(self, now: float) -> PeerAction:
        """Return what to do with the peer at unix time `now`."""
        if self.shunned_until > now:
            return PeerAction.SHUN
        return PeerAction.DOUBT if self.doubts else PeerAction.USE


def after(known: PeerStanding, found: PeerFinding) -> PeerStanding:
    """Return the standing of a peer after one more finding: the rule.

    A shunned peer is left out for a week and starts as a newcomer then. A machine that rounds otherwise than others may do so at
    one place of a text each time, so a text counts a quarter of a near miss if it comes again.
    """
    left, kind = known.fading(found.at), found.kind
    passed, near, audited = left * known.passed, left * known.near_misses, left * known.audited
    doubts, texts, is_false = known.doubts, known.near_texts, kind == Kind.FALSE
    if kind == Kind.RIGHT:
        passed, audited = passed + found.weight, audited + found.weight
    elif kind == Kind.NEAR:
        text = bytes.fromhex(found.other)
        counts = tolerances.REPEATED if text in texts else 1.0
        texts = texts if text in texts else (*texts, text)[-tolerances.MAX_NEAR_TEXTS :]
        passed, near, audited = passed / 2, near + counts, audited + counts * found.weight
        is_false = are_too_many(near, audited)
    elif kind == Kind.UNCLEAR:
        passed /= 2
    elif kind == Kind.SILENT:
        passed = 0.0
    elif kind == Kind.CONTRADICTION:
        recent = {other: at for other, at in doubts.items() if at > found.at - tolerances.DOUBT_S}
        doubts = {**recent, found.other: found.at}
        is_false = len(doubts) >= tolerances.DOUBTS
    latest = (*(one for one in known.findings if one.kind != kind), found)[-LATEST:]
    if is_false:
        until = found.at + tolerances.SHUN_S
        return PeerStanding(at=found.at, shunned_until=until, findings=latest, proved=kind == Kind.FALSE)
    kept = known.shunned_until, doubts, near, audited, texts, latest, known.proved
    return PeerStanding(passed, found.at, *kept)


def are_too_many(near_misses: float, positions: float) -> bool:
    """Return whether `near_misses` in `positions` audited positions are too many.

    They are if there are at least `NEAR_MISSES` and an honest peer has as many with a probability below `CHANCE`.
    """
    if near_misses < tolerances.NEAR_MISSES:
        return False
    expected = tolerances.NEAR_MISS_RATE * positions
    below = math.fsum(expected**count / math.factorial(count) for count in range(math.floor(near_misses)))
    return 1 - math.exp(-expected) * below < tolerances.CHANCE


class Signs(NamedTuple):
    """Measures of a member's gradients over the `steps` of an all-reduce, as another member sees them: mean `distance` from the
    centre and `constancy` of its direction (both about 1 for an honest member), and how far they were `against` the others'."""

    distance: float
    against: float
    constancy: float
    steps: int


def outlier(members: Mapping[str, Signs]) -> str | None:
    """Return the member whose history of contributions stands out the most; None if none does."""
    farthest = max(members, key=lambda peer: members[peer].distance, default=None)
    if farthest is not None and members[farthest].distance > tolerances.OUTLYING:
        return farthest
    against = max(members, key=lambda peer: members[peer].against, default=None)
    if against is not None and members[against].against > tolerances.AGAINST:
        return against
    constancy = {peer: signs.constancy for peer, signs in members.items() if signs.steps >= tolerances.STEPS}
    if len(constancy) < 2:
        return None
    steadiest = max(constancy, key=constancy.__getitem__)
    others = statistics.median(value for peer, value in constancy.items() if peer != steadiest)
    return steadiest if constancy[steadiest] > max(tolerances.CONSTANT, tolerances.OTHERS * others) else None
