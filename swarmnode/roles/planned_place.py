"""A node's place in a plan that a host made: where it begins, and how long it stays there."""

from __future__ import annotations

from swarmnode.plan.offline.plan_file import PlanFile
from swarmnode.roles.host import Host
from swarmnode.swarm.records.announcement import State

COMING_S = 600.0  # that a node waits for others of its plan which were never here; then they count as gone
HOLDING = (State.LOADING, State.READY)


class PlannedPlace:
    """Of one node, from when it joins. `span` is empty where the plan does without it.

    A plan is made for all of its peers. While they are where it puts them, or still come, each stays, however much better another
    order may look with half of them here; once one has gone, or is elsewhere, they go on as all do.
    """

    def __init__(self, plan: PlanFile, host: Host) -> None:
        assert host.swarm.manifest is not None
        units = host.swarm.manifest.model.units
        self.span = plan.span_of(host.peer_id, units)
        planned = zip(plan.peers, plan.spans(len(plan.peers), units), strict=True)
        self._spans = {peer: span for peer, span in planned if span.units}
        self._came: set[str] = set()
        self._host = host
        self._joined_s = host.clock.monotonic()

    def __repr__(self) -> str:
        return f"<PlannedPlace {self.span}, {len(self._came)} of {len(self._spans)} peers came>"

    def holds(self) -> bool:
        """Whether the node stays for the plan's sake."""
        if not self.span.units:
            return False
        announced = self._host.directory.peers()
        here = {peer: one for peer, one in announced.items() if peer in self._spans and one.life in HOLDING}
        self._came |= here.keys()
        comes = self._host.clock.monotonic() - self._joined_s < COMING_S
        missing = (self._came if comes else self._spans.keys()) - here.keys()
        return not missing and all(tuple(one.span) == self._spans[peer] for peer, one in here.items())
