"""Lattice: least-cost routes over spans.

The model is cut into segments at the starts and ends of all spans. Changing peers anywhere else gains nothing as long
as a detour is no shorter than the direct link, since the time of a layer depends on the peer alone: the place of a
change can slide either way until it meets the end of a span. (A ring's entry counts less than its links, so a first hop of one
layer on a peer near the client may gain a per cent: not looked for.) A dynamic programme runs over the segments from the last
to the first:

    cost[k, p] = time of segment k on p + min(cost[k + 1, p],  min over q of link(p, q) + hop + cost[k + 1, q])

which is Dijkstra's result without its queue, as the segments are in order. A ring also pays the link from its last
peer to its first, which ties both ends together: first peers are tried in the order of a lower bound, and as soon as
the next bound is not below the best ring found, that one is the optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmnode.codec.body import HopSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.routes.delays import position_times
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.view import Span, View

Indexes = npt.NDArray[np.intp]


@dataclass(frozen=True)
class RoutingConfig:
    """Weights of a route's cost besides the measured speeds and links."""

    hop_s: float = 0.001  # framing, wake-ups and queues of one more peer
    load_weight: float = 0.2  # a peer with five sessions counts as half as fast: batching makes up for most of it
    entry_weight: float = 0.1  # a ring passes the client's link once, not once per token
    full_s: float = 0.25  # per unit: of a peer that says it has no room; it may have by now, and else answers BUSY
    replay_s: float = 0.25  # per unit: what moving its cache to another peer costs a running session
    drafting: float = 0.8  # of a ring's time, if its first hop has the wanted draft model: it may be a quarter slower


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Planned length of a session, in positions of all its rows; 0 if unknown. `proposer` is the source of guesses that its client
    wants, as in `Open`."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    proposer: str = ""

    @property
    def tokens(self) -> int:
        """Positions that each cache of its route must hold."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class Route:
    """Hops whose spans cover the layers in order, and the estimated seconds of one token (and of replays) along them."""

    hops: tuple[HopSpec, ...]
    cost_s: float

    def __repr__(self) -> str:
        hops = " -> ".join(f"{hop.peer[-8:]}[{hop.start}:{hop.end})" for hop in self.hops)
        return f"<Route {hops} {self.cost_s * 1000:.2f} ms>"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer's possible part in the route: any part of its span, or if `exact` the span as it is. `unit_s`: seconds per layer."""

    peer: PeerId
    span: Span
    unit_s: float
    exact: bool = False
    drafts: bool = False  # it has the draft model that the client wants


@dataclass(frozen=True, slots=True)
class Request:
    """Request for a route: the layers, the client, and whether the ring closes from the last hop to the first."""

    span: Span
    client: PeerId | None
    ring: bool


class Lattice:
    """All routes through the segments of the model. Index p is a candidate and k a segment; impossible routes cost infinite
    seconds."""

    def __init__(self, view: View, candidates: Sequence[Candidate], request: Request, config: RoutingConfig) -> None:
        self._candidates = candidates
        self._request = request
        self._config = config
        starts = np.array([candidate.span.start for candidate in candidates])
        ends = np.array([candidate.span.end for candidate in candidates])
        exact = np.array([candidate.exact for candidate in candidates])
        self._worth = np.array([config.drafting if candidate.drafts else 1.0 for candidate in candidates])
        unit_s = np.array([candidate.unit_s for candidate in candidates])
        self._edges = np.unique(np.concatenate([starts, ends, request.span]))
        left, right = self._edges[:-1, None], self._edges[1:, None]
        held = (starts <= left) & (ends >= right)
        self._compute = np.where(held, (right - left) * unit_s, np.inf)
        self._may_enter = ~exact | (starts == left)
        self._may_leave = ~exact | (ends == right)
        self._holders = [np.flatnonzero(row) for row in held]
        self._link_s, self._client_s, self._same = _links(view, candidates, request.client)
        onward = np.where(self._same, np.inf, self._link_s + config.hop_s)
        self._onward = [
            onward[np.ix_(here, there)] for here, there in zip(self._holders, self._holders[1:], strict=False)
        ]

    def best(self) -> Route | None:
        """Return the route of least cost; None if some segment has no candidate. A peer may occur twice."""
        if any(len(holders) == 0 for holders in self._holders):
            return None
        return self._best_ring() if self._request.ring else self._best_line()

    def _best_line(self) -> Route | None:
        cost, choices = self._solve(self._client_s)
        total = cost + self._client_s
        first = int(np.argmin(total))
        return self._route(first, choices, float(total[first])) if np.isfinite(total[first]) else None

    def _best_ring(self) -> Route | None:
        entry = self._client_s * self._config.entry_weight
        closing = np.where(self._same, 0.0, self._link_s)  # [last, first]
        open_cost, _ = self._solve(np.zeros(len(entry)))
        bound = self._worth * (entry + open_cost + closing[self._holders[-1]].min(axis=0))
        best: tuple[float, int, list[Indexes]] | None = None
        for first in map(int, np.argsort(bound, kind="stable")):
            if not np.isfinite(bound[first]) or (best is not None and bound[first] >= best[0]):
                break
            cost, choices = self._solve(closing[:, first])
            total = float(self._worth[first] * (entry[first] + cost[first]))
            if best is None or total < best[0]:
                best = (total, first, choices)
        return (
            None if best is None or not np.isfinite(best[0]) else self._route(best[1], choices=best[2], cost_s=best[0])
        )

    def _solve(self, exit_s: Floats) -> tuple[Floats, list[Indexes]]:
        """Return the cost from segment 0 on each candidate to the end, and for each segment the next candidate."""
        cost: Floats = self._compute[-1] + np.where(self._may_leave[-1], exit_s, np.inf)
        choices: list[Indexes] = []
        for k in range(len(self._holders) - 2, -1, -1):
            here, there = self._holders[k], self._holders[k + 1]
            enter = np.where(self._may_enter[k + 1], cost, np.inf)[there]
            through = self._onward[k] + enter
            change = np.argmin(through, axis=1)
            change_s = np.where(self._may_leave[k][here], through[np.arange(len(here)), change], np.inf)
            stays = cost[here] <= change_s
            choice = np.arange(len(cost))
            choice[here] = np.where(stays, here, there[change])
            onward = np.full(len(cost), np.inf)
            onward[here] = np.where(stays, cost[here], change_s)
            cost = self._compute[k] + onward
            choices.append(choice)
        return cost, choices[::-1]

    def _route(self, first: int, choices: list[Indexes], cost_s: float) -> Route:
        """Return the route that follows `choices` from the candidate `first`. Adjoining segments on one peer become one hop."""
        path = [first]
        for choice in choices:
            path.append(int(choice[path[-1]]))
        hops: list[HopSpec] = []
        start = 0
        for k, here in enumerate(path):
            if k + 1 == len(path) or path[k + 1] != here:
                hops.append(HopSpec(self._candidates[here].peer, int(self._edges[start]), int(self._edges[k + 1])))
                start = k + 1
        return Route(tuple(hops), cost_s)


def _links(
    view: View, candidates: Sequence[Candidate], client: PeerId | None
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Return the seconds of one position from candidate to candidate, those to the client, and which candidates are the same
    peer."""
    names = {name: index for index, name in enumerate(dict.fromkeys(candidate.peer for candidate in candidates))}
    seconds = position_times(view, [*names, client])
    index = np.array([names[candidate.peer] for candidate in candidates])
    same = index[:, None] == index[None, :]
    return seconds[np.ix_(index, index)], seconds[index, len(names)], same
