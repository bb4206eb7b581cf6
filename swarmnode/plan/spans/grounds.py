"""The grounds of a placement, in sentences: what a view says of the span that was decided on."""

from __future__ import annotations

from swarmnode.counting import counted
from swarmnode.plan.spans.capacity_index import CapacityIndex
from swarmnode.plan.spans.placement import HOLDING, Joiner
from swarmnode.plan.view import Span, View


def grounds(view: View, joiner: Joiner, span: Span) -> tuple[str, ...]:
    """What spoke for `span`: who else is there, which of its units nobody else holds, and what the joiner can do."""
    others = [peer for peer in view.peers if peer.peer != joiner.peer and peer.state in HOLDING and peer.span.units]
    holders_U = CapacityIndex(view.units, others).holders_U
    held = holders_U[span.start : span.end]
    alone = int((holders_U == 0).sum())
    return (
        f"units are held or claimed by {counted(len(others), 'other peer')}; {alone} of {view.units} have nobody else",
        f"of the units {span} {int((held == 0).sum())} have nobody else and {int((held == 1).sum())} one other peer",
        f"there is room for {counted(min(joiner.capacity_units, view.units), 'unit')} in the memory that is lent",
        f"{joiner.decode_units_per_s:.4g} units/s were measured here"
        if joiner.decode_units_per_s
        else "this node's speed was not measured yet",
    )
