"""Suspicions: whom others of a training accuse, and what comes of looking there. Nobody is believed, and who accuses in vain pays
for it with standing, as for a report in serving (`roles/serving/audits/reports.py`)."""

from __future__ import annotations

from collections.abc import Collection

from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.peers.standing import Standing

LOOKS = 3  # that have to pass before an accusation is taken for false: who lies now and then is not seen by each
MAX_SUSPICIONS = 64


class Suspicions:
    """One of each author at a time, so that nobody turns all looks away from somebody else."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._by_author: dict[PeerId, tuple[PeerId, list[str]]] = {}  # the accused, and what looks at it came to

    def __repr__(self) -> str:
        return f"<Suspicions of {len(self._by_author)} authors>"

    def __len__(self) -> int:
        return len(self._by_author)

    def hear(self, author: PeerId, accused: PeerId) -> None:
        """An accusation; nothing, where its author has accused in vain before, or another one is being looked into."""
        doubtful = author == accused or author in self._standing.shunned | self._standing.doubted
        if not doubtful and author not in self._by_author and len(self._by_author) < MAX_SUSPICIONS:
            self._by_author[author] = (accused, [])

    def next(self, peers: Collection[PeerId]) -> PeerId | None:
        """Whom to look at: one of these peers that another one of them accuses."""
        told = ((author, accused) for author, (accused, _) in self._by_author.items())
        return next((accused for author, accused in told if author in peers and accused in peers), None)

    def looked(self, accused: PeerId, result: str) -> None:
        """What a look at a peer came to, for whatever reason it was looked at."""
        for author, (told, results) in list(self._by_author.items()):
            if told != accused:
                continue
            results.append(result)
            if result == "false" or len(results) == LOOKS:
                del self._by_author[author]
            if results == ["passed"] * LOOKS:
                self._standing.accused_in_vain(author, accused)
