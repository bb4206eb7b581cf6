"""The latest decisions of a peer, by topic, each with the facts behind it; `swarmnode why` shows them.

Code that decides notes the decision at once, since the facts may have changed a moment later.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

KEPT = 16  # decisions of each topic, so that strangers' requests drive out no decision of another topic
MAX_UNIT_DIGITS = 6
MAX_CHARS = 240  # of a sentence: parts of it come from other peers


def names_unit(subject: str) -> bool:
    """Return whether `subject` is the number of a layer; ids of peers and sessions are longer."""
    return subject.isdecimal() and len(subject) <= MAX_UNIT_DIGITS


class Topic(str, Enum):
    """Subject area of a recorded decision, as `swarmnode why` shows it."""

    PLACEMENT = "placement"
    ROUTING = "routing"
    ADMISSION = "admission"
    LENDING = "lending"
    AUDIT = "audit"
    REACHABILITY = "reachability"
    TRAINING = "training"


@dataclass(frozen=True)
class Decision:
    """A decision, `what`, and the `facts` behind it, in sentences.

    `about` holds the ids of the peers and sessions concerned, the asking peer first. `units` is the range from the first to before
    the last. Equal decisions are counted in `times`; `at` is the unix time of the latest.
    """

    topic: Topic
    at: float
    what: str
    facts: tuple[str, ...] = ()
    about: tuple[str, ...] = ()
    units: tuple[int, int] = (0, 0)
    times: int = 1

    def concerns(self, subject: str) -> bool:
        """Return whether the decision is about `subject`: the number of a layer, or the beginning or end of the id of a peer or
        session. Always true if `subject` is empty."""
        if names_unit(subject):
            return self.units[0] <= int(subject) < self.units[1]
        return any(each.endswith(subject) or each.startswith(subject) for each in self.about) or not subject

    def to_json(self) -> dict[str, Any]:
        """Return the decision as a dict that JSON can hold."""
        return {**asdict(self), "topic": self.topic.value}


class DecisionLog:
    """A bounded list of the latest decisions of each topic. Decisions with the same text and the same first id are kept once, with
    their number."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._rings: dict[Topic, OrderedDict[tuple[str, ...], Decision]] = {topic: OrderedDict() for topic in Topic}

    def record(
        self,
        topic: Topic,
        what: str,
        facts: Iterable[str] = (),
        *,
        about: tuple[str, ...] = (),
        units: tuple[int, int] = (0, 0),
    ) -> None:
        """Record a decision just taken, with the `facts` behind it. Each topic keeps at most KEPT decisions; the oldest goes
        first."""
        ring, key = self._rings[topic], (what, *about[:1])
        decision = Decision(
            topic, self._now(), what[:MAX_CHARS], tuple(fact[:MAX_CHARS] for fact in facts), about, units
        )
        earlier = ring.pop(key, None)
        ring[key] = decision if earlier is None else replace(decision, times=earlier.times + 1)
        if len(ring) > KEPT:
            ring.popitem(last=False)

    def about(self, subject: str = "") -> list[Decision]:
        """Return the decisions that concern `subject` (all if it is empty), the latest first."""
        found = [one for ring in self._rings.values() for one in ring.values() if one.concerns(subject)]
        return sorted(found, key=lambda decision: -decision.at)
