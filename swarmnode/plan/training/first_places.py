"""Before a run's first step: whether those who are to train are still on their way to their places.

As long as nothing is learnt, a node loads what every volunteer can load; afterwards whoever moves has to be sent parameters and the
optimizer's memories of them, over lines that may take minutes for it. A first step that ends while some have moved and
others not fixes an order of stages that nobody had chosen. So whoever leads lets them go first, for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swarmnode.plan.view import PeerView
from swarmnode.swarm.records.announcement import State

ON_THE_WAY = frozenset({State.JOINING, State.LOADING, State.DRAINING})


class FirstPlaces:
    """As one node sees them at each look for its own place. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._awaited = False
        self._places: object = None
        self._still_until_s = 0.0

    def __repr__(self) -> str:
        return f"<FirstPlaces, {'awaited' if self.awaited else 'taken'}>"

    def note(self, peers: Sequence[PeerView], *, elsewhere: bool, patience_s: float) -> None:
        """`elsewhere`: whether it is worth it that all go to other places; then these are awaited, and those who are on their way
        to them, until for `patience_s` nobody has gone anywhere."""
        on_the_way = any(peer.span.units and peer.state in ON_THE_WAY for peer in peers)
        places = {peer.peer: (peer.span, peer.state in ON_THE_WAY) for peer in peers}
        if places != self._places or (elsewhere and not self._awaited):
            self._places, self._still_until_s = places, self._clock() + patience_s
        self._awaited = elsewhere or (self._awaited and on_the_way)

    @property
    def awaited(self) -> bool:
        """Whether a first step had better wait."""
        return self._awaited and self._clock() < self._still_until_s
