"""What further holders of units are worth in training: a planner and live peers weigh them alike.

Whoever holds a unit alone takes what it has learnt along when it vanishes, and the run waits for another holder.
"""

from __future__ import annotations

from typing import TypeVar

from swarmnode.plan.spans.flow import Floats

HOLDERS = 2  # that a unit should have, so that losing one loses nothing that was learnt
FRAGILE = 3.0  # more of a step, relative, are further holders of all units worth

Share = TypeVar("Share", float, Floats)


def fragility(missing: Share) -> Share:
    """How many times as long a step may take where none of the units' further holders is missing, if this share of them is."""
    return 1 + FRAGILE * missing
