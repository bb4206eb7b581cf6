"""Record of findings about the peers of one swarm, in a small file of the home folder.

Sessions, audits, trainings, tunings and passes through modules add findings. `plan/findings.py` decides what follows from them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from swarmnode import tolerances
from swarmnode.decisions import DecisionLog, Topic
from swarmnode.metrics import table
from swarmnode.metrics.metric import Reading, Readings
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.findings import Kind, PeerAction, PeerFinding, PeerStanding, after
from swarmnode.swarm.storage.small_files import read_stored, try_to_keep

log = logging.getLogger(__name__)

MAX_PEERS = 1_024
MAX_FILE_BYTES = 8 << 20  # more than MAX_PEERS entries of the largest size
MAX_EVIDENCE = 160  # characters
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


class Findings:
    """Record of findings about the peers of one swarm, kept in the file `path`. A missing or damaged file counts as empty. `now`
    returns unix time in seconds. `decisions` gets the decisions."""

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
            evidence: The observation, in a sentence.
            weight: Positions that were compared, for RIGHT and NEAR.
            other: The other side of a contradiction, or the digest of a text in hex.
        """
        found = PeerFinding(kind.value, self._now(), weight, other, evidence[:MAX_EVIDENCE])
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

    def has_settled(self, author: PeerId, accused: PeerId, results: Sequence[str]) -> bool:
        """Return whether an accusation is settled by the `results` of audits or checks of the accused peer: one was false, or there
        are TRIALS. If all of these passed, the author is in doubt from now on."""
        is_over = "false" in results or len(results) >= tolerances.TRIALS
        if is_over and set(results) == {"passed"}:
            self.doubt(author, f"honest results of {accused}, which it accused")
        return is_over

    def of(self, peer: PeerId) -> PeerStanding:
        """Return the standing of a peer; that of a newcomer if nothing was found."""
        return self._peers.get(peer, PeerStanding())

    def action(self, peer: PeerId) -> PeerAction:
        """Return what to do with a peer now."""
        return self.of(peer).action(self._now())

    @property
    def shunned(self) -> frozenset[PeerId]:
        """Peers that are excluded now, because they were found to compute falsely."""
        now = self._now()
        return frozenset(peer for peer, known in self._peers.items() if known.shunned_until > now)

    @property
    def proved(self) -> frozenset[PeerId]:
        """Shunned peers whose work was false, as a computation here or by a third peer showed."""
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
        """Return the rank of an entry in a full table, which drops the lowest: shunned, suspicious, trusted."""
        now = self._now()
        return known.shunned_until > now, bool(known.doubts or known.near_misses), known.passed * known.fading(now)
