"""The rules of other systems, to measure ours against: Petals and SWARM, each as its paper tells.

Petals (arXiv 2209.01188, section 3.2): a server takes the window whose blocks have the least throughput, compared as a
sorted list; later it asks what the swarm would do if it moved, and moves where the present is worth less than 0.75 of that.

SWARM (arXiv 2301.11913, section 3.2): the model is cut into equal stages; a newcomer joins the stage with the least
throughput; again and again a peer of the least loaded stage moves to the most loaded one. Which of its peers: the one
that is used least, that is the slowest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmnode.plan.spans.placement import Joiner
from swarmnode.plan.spans.settling import Rule
from swarmnode.plan.view import PeerView, Span, View

PETALS_BALANCE = 0.75


def petals() -> Rule:
    """Petals' rule."""
    return Rule("Petals", _petals_join, _petals_again)


def _petals_join(view: View, joiner: Joiner) -> Span:
    size = max(1, min(joiner.capacity_units, view.units))
    totals = _throughputs(view.units, [peer for peer in view.peers if peer.peer != joiner.peer])
    start = min(range(view.units - size + 1), key=lambda start: (sorted(totals[start : start + size]), start))
    return Span(start, start + size)


def _petals_again(view: View, joiner: Joiner) -> Span | None:
    others = [peer for peer in view.peers if peer.peer != joiner.peer]
    now = min(_throughputs(view.units, view.peers))
    span = _petals_join(view, joiner)
    moved = PeerView(joiner.peer, span, decode_units_per_s=joiner.decode_units_per_s)
    then = min(_throughputs(view.units, [*others, moved]))
    return span if now < PETALS_BALANCE * then else None


def _throughputs(units: int, peers: Iterable[PeerView]) -> list[float]:
    """Per block, the sum over its servers of speed / blocks served."""
    totals = [0.0] * units
    for peer in peers:
        for unit in range(*peer.span):
            totals[unit] += peer.decode_units_per_s / peer.span.units
    return totals


@dataclass(frozen=True)
class Stages:
    """A model cut into equal stages of `size` units (the last one may be shorter)."""

    units: int
    size: int

    def spans(self) -> list[Span]:
        """The stages in order."""
        return [Span(start, min(start + self.size, self.units)) for start in range(0, self.units, self.size)]

    def loads(self, view: View) -> dict[Span, float]:
        """Load of each stage: the share of a token's time that its peers together need."""
        speeds = dict.fromkeys(self.spans(), 0.0)
        for peer in view.peers:
            if peer.span in speeds:
                speeds[peer.span] += peer.decode_units_per_s
        return {span: span.units / speed if speed else float("inf") for span, speed in speeds.items()}


def swarm(units: int, stage_units: int) -> Rule:
    """SWARM's rule with stages of so many units. A peer whose memory is too small for one holds nothing."""
    stages = Stages(units, stage_units)

    def join(view: View, joiner: Joiner) -> Span:
        if joiner.capacity_units < stage_units:
            return Span(0, 0)
        loads = stages.loads(View(view.units, tuple(peer for peer in view.peers if peer.peer != joiner.peer)))
        return max(loads, key=lambda span: (loads[span], -span.start))

    def again(view: View, joiner: Joiner) -> Span | None:
        loads = stages.loads(view)
        least, most = min(loads, key=lambda span: loads[span]), max(loads, key=lambda span: loads[span])
        idle = [peer for peer in view.peers if peer.span == least]
        if not idle:
            return None
        slowest = min(idle, key=lambda peer: (peer.decode_units_per_s, peer.peer))
        if slowest.peer != joiner.peer or len(idle) < 2:
            return None  # not its turn, or the stage would be left without anybody
        speed_left = least.units / loads[least] - slowest.decode_units_per_s
        return most if least.units / speed_left < loads[most] else None

    return Rule("SWARM", join, again)
