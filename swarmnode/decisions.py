"""Why a peer does what it does: the latest decisions of each kind, with what they were decided on.

Whoever decides writes it down at once, for a moment later the facts may be others. `swarmnode why` reads it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

KEPT = 16  # of each topic, so that what strangers ask for drives out no decision of another kind
MAX_UNIT_DIGITS = 6
MAX_CHARS = 240  # of a sentence: some of it is of strangers


def names_unit(subject: str) -> bool:
    """Whether somebody who says this means a unit; ids of peers and sessions are longer."""
    return subject.isdecimal() and len(subject) <= MAX_UNIT_DIGITS


class Topic(str, Enum):
    """What a decision is about."""

    PLACEMENT = "placement"
    ROUTING = "routing"
    ADMISSION = "admission"
    LENDING = "lending"
    AUDIT = "audit"
    REACHABILITY = "reachability"
    TRAINING = "training"


@dataclass(frozen=True)
class Decision:
    """`what` was decided, and the `facts` it was decided on, in sentences. `about`: the peers and sessions concerned, whoever asked
    first; `units`: from the first to before the last. `at` is unix time of the latest of `times` equal ones."""

    topic: Topic
    at: float
    what: str
    facts: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    units: tuple[int, int] = (0, 0)
    times: int = 1

    def concerns(self, subject: str) -> bool:
        """Whether it is about a peer or session of this id, or the end of one, or a unit of this number; all are about nothing."""
        if names_unit(subject):
            return self.units[0] <= int(subject) < self.units[1]
        return any(each.endswith(subject) or each.startswith(subject) for each in self.about) or not subject

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        return {**asdict(self), "topic": self.topic.value}


class DecisionLog:
    """A ring for each topic. Of decisions that say the same about the same one the latest is kept, and how many there were."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._rings: dict[Topic, OrderedDict[tuple[str, ...], Decision]] = {topic: OrderedDict() for topic in Topic}

    def __repr__(self) -> str:
        return f"<DecisionLog of {sum(map(len, self._rings.values()))} decisions>"

    def note(
        self,
        topic: Topic,
        what: str,
        facts: Iterable[str] = (),
        *,
        about: tuple[str, ...] = (),
        units: tuple[int, int] = (0, 0),
    ) -> None:
        """Write down a decision that was just taken."""
        ring, key = self._rings[topic], (what, *about[:1])
        decision = Decision(
            topic, self._now(), what[:MAX_CHARS], tuple(fact[:MAX_CHARS] for fact in facts), about, units
        )
        earlier = ring.pop(key, None)
        ring[key] = decision if earlier is None else replace(decision, times=earlier.times + 1)
        if len(ring) > KEPT:
            ring.popitem(last=False)

    def about(self, subject: str = "") -> list[Decision]:
        """What concerns it, the latest first."""
        found = [one for ring in self._rings.values() for one in ring.values() if one.concerns(subject)]
        return sorted(found, key=lambda decision: -decision.at)
