"""What each hop did in a session, as its client sees it: an output that came says that the whole route had all positions before."""

from __future__ import annotations

from collections.abc import Iterator

from swarmnode.codec.messages import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.roles.serving.client.router import Route


class ServedWork:
    """Of one session over all its routes, by the ids that it had."""

    def __init__(self) -> None:
        self._tokens: dict[tuple[bytes, HopSpec], int] = {}
        self._given: dict[tuple[bytes, HopSpec], int] = {}

    def __repr__(self) -> str:
        return f"<ServedWork {dict(self.by_peer_and_session())}>"

    def given(self, session: bytes, route: Route, tokens: int) -> None:
        """A session began with so many tokens of another one, which these hops are not credited for once more."""
        self._given = {(session, hop): tokens for hop in route}

    def heard(self, session: bytes, route: Route, tokens: int) -> None:
        """An output came for which the hops of this route have computed so many tokens, of all rows."""
        for hop in route:
            self._tokens[session, hop] = max(0, tokens - self._given.get((session, hop), 0))

    def by_peer_and_session(self) -> Iterator[tuple[tuple[PeerId, bytes], int]]:
        """Who did how much under which id, in units times tokens."""
        totals: dict[tuple[PeerId, bytes], int] = {}
        for (session, hop), tokens in self._tokens.items():
            place = hop.peer, session
            totals[place] = totals.get(place, 0) + (hop.end - hop.start) * tokens
        yield from totals.items()

    def taken(self) -> ServedWork:
        """All of it, which is not here any more: nobody is credited twice."""
        other = ServedWork()
        other._tokens, self._tokens = self._tokens, {}
        return other
