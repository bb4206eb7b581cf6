"""Record of findings about peers, and the rule that decides from them whether to use, avoid, doubt, shun or report a peer.

A finding is one observation of one peer: its kind, time, weight and evidence. Sessions, audits, trainings, tunings and passes
through modules add findings. `why`, `status`, the page and the metrics read them. The rule is the pure function `after`. Its
numbers are in `tolerances.py`.

Findings of one kind add up. Positions found right raise trust, which fades within days. Near misses over several texts, or
contradictions with several peers, get a peer shunned as one false result does. A failure makes a peer rest for a while, and says
nothing of its honesty.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Protocol

import msgspec

from swarmnode import tolerances
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.errors import ErrorCode
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.deadlines import Backoff
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

log = logging.getLogger(__name__)

MAX_PEERS = 1_024
MAX_FILE_BYTES = 8 << 20  # more than MAX_PEERS entries of the largest size
LATEST = 8  # findings of a peer that are kept for people, the last one of each kind
MAX_EVIDENCE = 160  # characters


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


class Action(str, Enum):
    """Decision about a peer, as the page shows it."""

    USE = "good"
    DOUBT = "doubted"
    SHUN = "shunned"


DECIDED = {
    Kind.RIGHT: "finds it right",
    Kind.NEAR: "trusts it less",
    Kind.CONTRADICTION: "doubts it",
}
SHUNNED = {
    Kind.NEAR: "its results for several texts deviate more from other peers' than chance explains",
    Kind.CONTRADICTION: "it contradicts one peer after another",
    Kind.FALSE: "it returned wrong results",
}


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
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
    findings: tuple[Finding, ...] = ()
    proved: bool = False

    def fading(self, now: float) -> float:
        """Return the share of the counts that is left at unix time `now`."""
        return 0.5 ** max(0.0, (now - self.at) / tolerances.HALF_LIFE_S)

    def sentences(self) -> list[str]:
        """Return a sentence for each kept finding, the last one of each kind, the latest at the end."""
        return [f"{found.kind}: {found.evidence}" for found in self.findings]

    def action(self, now: float) -> Action:
        """Return what to do with the peer at unix time `now`."""
        if self.shunned_until > now:
            return Action.SHUN
        return Action.DOUBT if self.doubts else Action.USE


def after(known: PeerStanding, found: Finding) -> PeerStanding:
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


class Findings:
    """Record of findings about the peers of one swarm, kept in the file `path`. A missing or damaged file counts as empty. `now`
    returns unix time in seconds. `decisions` gets what was decided."""

    def __init__(self, path: Path, now: Callable[[], float], decisions: DecisionLog | None = None) -> None:
        self._path = path
        self._now = now
        self._decisions = decisions
        self._peers = read_stored(path, dict[PeerId, PeerStanding], max_bytes=MAX_FILE_BYTES) or {}
        self._counts: Counter[Kind] = Counter()
        self._changed = False

    def add(self, peer: PeerId, kind: Kind, evidence: str, *, weight: float = 1.0, other: str = "") -> bool:
        """Add a finding about `peer`. Returns whether the peer is shunned for it.

        Args:
            peer: The peer.
            kind: Kind of the finding.
            evidence: What was found, in a sentence.
            weight: Positions that were compared, for RIGHT and NEAR.
            other: The other side of a contradiction, or the digest of a text in hex.
        """
        found = Finding(kind.value, self._now(), weight, other, evidence[:MAX_EVIDENCE])
        self._counts[kind] += 1
        self._changed = True
        known = self._peers.get(peer, PeerStanding())
        if peer not in self._peers and len(self._peers) >= MAX_PEERS:
            del self._peers[min(self._peers, key=lambda one: self._importance(self._peers[one]))]
        self._peers[peer] = after(known, found)
        is_shunned = kind in SHUNNED and self._peers[peer].shunned_until == found.at + tolerances.SHUN_S
        facts = [evidence, f"this machine trusts it {self.trust(peer):.0%}; results that are right raise that"]
        if is_shunned:
            log.warning("peer %s is left out from now on: %s (%s)", peer, SHUNNED[kind], evidence)
            facts.insert(0, SHUNNED[kind])
        decided = "leaves it out for a week" if is_shunned else DECIDED.get(kind)
        if self._decisions is not None and decided is not None:
            self._decisions.record(Topic.AUDIT, decided, facts, about=(peer,))
        return is_shunned

    def contradict(self, first: PeerId, other: PeerId) -> bool:
        """Add that two peers contradict each other and this machine cannot tell which of them is wrong. Returns whether `first` is
        shunned for it."""
        is_shunned = self.add(first, Kind.CONTRADICTION, f"it contradicts {other}", other=other)
        if first != other:
            self.add(other, Kind.CONTRADICTION, f"it contradicts {first}", other=first)
        return is_shunned

    def doubt(self, peer: PeerId, what: str) -> bool:
        """Add that `peer` contradicts itself, or others, about `what`, a text or another peer. Returns whether it is shunned for
        it."""
        return self.add(peer, Kind.CONTRADICTION, f"it contradicts {what}", other=what)

    def accused_in_vain(self, author: PeerId, accused: PeerId) -> None:
        """Doubt the author of an accusation, because the accused peer passed every trial."""
        self.doubt(author, f"the honest results of {accused}, which it accused")

    def of(self, peer: PeerId) -> PeerStanding:
        """Return the standing of a peer; that of a newcomer if nothing was found."""
        return self._peers.get(peer, PeerStanding())

    def action(self, peer: PeerId) -> Action:
        """Return what to do with a peer now."""
        return self.of(peer).action(self._now())

    @property
    def shunned(self) -> frozenset[PeerId]:
        """Peers that are excluded now, because they were found to compute falsely."""
        now = self._now()
        return frozenset(peer for peer, known in self._peers.items() if known.shunned_until > now)

    @property
    def proved(self) -> frozenset[PeerId]:
        """Those of the shunned peers whose work was false, as a computation here or by a third peer showed."""
        return frozenset(peer for peer in self.shunned if self._peers[peer].proved)

    @property
    def doubted(self) -> frozenset[PeerId]:
        """Peers with a doubt on record. Being shunned clears the doubts of a peer."""
        return frozenset(peer for peer, known in self._peers.items() if known.doubts)

    def trust(self, peer: PeerId) -> float:
        """Return the trust in a peer, from 0 for a newcomer towards 1."""
        known = self.of(peer)
        passed = known.passed * known.fading(self._now())
        return passed / (passed + tolerances.HALF_TRUST)

    def weights(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """Return the weight of each peer's speed, relative to the most trusted of them, which has 1."""
        newcomer = tolerances.NEWCOMER_WEIGHT
        weights = {peer: newcomer + (1 - newcomer) * self.trust(peer) for peer in peers}
        most = max(weights.values(), default=1.0)
        return {peer: weight / most for peer, weight in weights.items()}

    def readings(self) -> Readings:
        """Yield the number of findings since the start, by kind."""
        for kind in Kind:
            yield Reading(table.FINDINGS, self._counts[kind], (kind.value,))

    def save(self) -> None:
        """Write the file if anything changed; a failure is logged. It may run on a thread."""
        if self._changed:
            self._changed = False
            try_to_keep(self._path, dict(self._peers), "what audits have found is")

    def _importance(self, known: PeerStanding) -> tuple[bool, bool, float]:
        """Return the order in which entries of a full table are kept: shunned, suspicious, trusted."""
        now = self._now()
        return known.shunned_until > now, bool(known.doubts or known.near_misses), known.passed * known.fading(now)


class Failures(Backoff):
    """Failures of peers at the work of one coordinator, kept over its terms. `clock` returns seconds.

    A peer rests after a failure, twice as long after each further one in a row. `findings` gets the peers that are left out.
    """

    def __init__(self, clock: Callable[[], float], findings: Findings | None = None) -> None:
        super().__init__(clock)
        self._findings = findings
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def record(self, peer: PeerId) -> int:
        """Record a failure of `peer` and return its number of consecutive failures. Failures during the pause after an
        earlier one do not count again."""
        if not self.rests(peer):
            self.failed(peer)
            self._in_a_row[peer] += 1
        return self._in_a_row[peer]

    def leave_out(self, peer: PeerId, reason: str) -> None:
        """Record that the coordinator goes on without `peer`, until it comes anew."""
        if self._findings is not None:
            self._findings.add(peer, Kind.LEFT_OUT, reason)

    def ban(self, peer: PeerId) -> None:
        """Exclude `peer` from this training for good."""
        self._banned[peer] = None

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """The banned peers, in the order of their bans."""
        return tuple(self._banned)

    def forgive(self, peer: PeerId) -> None:
        """Record a success of `peer`: its failures and its back-off end."""
        self.succeeded(peer)
        self._in_a_row.pop(peer, None)

    def in_a_row(self, peer: PeerId) -> int:
        """Return the number of failures of `peer` since its last success."""
        return self._in_a_row[peer]

    def rests(self, peer: PeerId) -> bool:
        """Return whether `peer` is banned or in a pause after a failure."""
        return self.pause_s(peer) > 0

    def pause_s(self, peer: PeerId) -> float:
        """Return the seconds until `peer` may be asked again; 0 if it may be now, infinite if it is banned."""
        return math.inf if peer in self._banned else super().pause_s(peer)


ALL_REDUCE, ANY = -1, -2  # in place of a microbatch's number
LASTING = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FINITE}
)
"""Lasting reasons, which a stage gives for itself. Others are temporary: a peer is lost, busy or at another step."""


class FailedAttempts:
    """Attempts of one step that failed for a lasting reason, by microbatch and stage, and the trainers that reported them.

    ANY counts all failures of a stage since its last success, so that a stage that fails everything is found no later than
    a stage that fails a certain microbatch.
    """

    def __init__(self) -> None:
        self._by_stage: defaultdict[int, Counter[PeerId]] = defaultdict(Counter)
        self._reporters: defaultdict[int, set[PeerId]] = defaultdict(set)
        self.code = 0  # of the latest failure

    @property
    def peers(self) -> set[PeerId]:
        """Peers whose stages have failed attempts at work."""
        return {peer for by_stage in self._by_stage.values() for peer in by_stage}

    def record(self, number: int, peer: PeerId, code: int, trainer: PeerId | None = None) -> None:
        """Count a failed attempt of `peer` at microbatch `number`, or at the all-reduce (ALL_REDUCE). Ignores temporary reasons.
        `trainer` reported it; None if the stage did."""
        if code not in LASTING and code in ErrorCode._value2member_map_:
            return
        self.code = code
        for key in (number,) if trainer is None else (number, ANY):
            self._by_stage[key][peer] += 1
            if trainer is not None:
                self._reporters[key].add(trainer)

    def forget(self, number: int, peers: Collection[PeerId]) -> None:
        """Forget the failures of microbatch `number`, and those of `peers`, whose stages have now computed it."""
        self._by_stage.pop(number, None)
        self._reporters.pop(number, None)
        for peer in peers:
            self._by_stage[ANY].pop(peer, None)

    def hopeless_unit(self, holders: Sequence[Collection[PeerId]], trainers: Collection[PeerId]) -> int | None:
        """Return the first layer whose `holders` have all failed ATTEMPTS times at the same work; None if there is none. The word
        of one trainer is not enough: each of `trainers` must have reported such failures. Failures of the all-reduce need none."""
        for number, by_stage in self._by_stage.items():
            if number != ALL_REDUCE and not self._reporters[number].issuperset(trainers):
                continue
            for unit, peers in enumerate(holders):
                if peers and all(by_stage[peer] >= tolerances.ATTEMPTS for peer in peers):
                    return unit
        return None


class Signs(Protocol):
    """What a member of an all-reduce has seen of another one's gradients over the steps."""

    distance: float
    against: float
    steps: int

    @property
    def constancy(self) -> float:
        """Measure of how little the member's deviation changes its direction; about 1 for an honest one."""


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
