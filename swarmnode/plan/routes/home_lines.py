"""Lines of homes: who is at home with whom, and how fast the lines are that they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from swarmnode.net.interfaces import PeerId
from swarmnode.plan.spans.flow import Bools
from swarmnode.plan.view import PeerView, View

HELD_S = 300.0  # how fast a path was


def shared_homes(homes: Sequence[str]) -> tuple[int, ...]:
    """Numbers that those have in common who are in the same home; nothing where each is in one of its own."""
    return tuple(map(homes.index, homes)) if len(set(homes)) < len(homes) else ()


def crowded(homes: Sequence[int], peers: int) -> Bools:
    """[N]: who is at home with others, by `shared_homes`."""
    home_N = np.array(homes or range(peers))
    crowded_N: Bools = (home_N[:, None] == home_N).sum(axis=1) > 1
    return crowded_N


def sharing_lines(homes: Sequence[int], peers: int) -> Bools:
    """[N, N]: paths that share the line of a home with others, by `shared_homes`: while all are used each gets a part of it."""
    home_N = np.array(homes or range(peers))
    crowded_N = crowded(homes, peers)
    sharing_NN: Bools = (home_N[:, None] != home_N) & (crowded_N[:, None] | crowded_N)
    return sharing_NN


class HomeLines:
    """How fast paths out of shared homes were at best, lately: while several are used at once each gets a part of the line, and the
    line is as fast as it was. `clock`: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._best: dict[tuple[PeerId, PeerId], tuple[float, float]] = {}  # bits/s, and until when they count

    def __repr__(self) -> str:
        return f"<HomeLines of {len(self._best)} paths>"

    def held(self, view: View, peers: Sequence[PeerView]) -> View:
        """The same view with these paths, where they were measured, as fast as they were."""
        now_s, homes = self._clock(), {peer.peer: peer.home or peer.peer for peer in peers}
        at_home = Counter(homes.values())
        before, self._best = self._best, {}
        for path, bps in view.path_bps.items():
            here, there = (homes.get(end, end) for end in path)
            if here != there and (at_home[here] > 1 or at_home[there] > 1):
                best_bps, until_s = before.get(path, (0.0, 0.0))
                self._best[path] = (bps, now_s + HELD_S) if bps >= best_bps or now_s >= until_s else (best_bps, until_s)
        return replace(view, path_bps={**view.path_bps, **{path: bps for path, (bps, _) in self._best.items()}})
