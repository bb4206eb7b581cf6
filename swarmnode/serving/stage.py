"""Stage: what a node (`node/node.py`) may ask of units that are served, served as a graph, or trained."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from swarmnode.ledger import MemoryLedger
from swarmnode.metrics.metric import Readings
from swarmnode.swarm.records.sections import Section

if TYPE_CHECKING:
    from swarmnode.serving.span_part import KeptSpan


class Stage(Protocol):
    """Units of a model that are loaded, and open to the requests of other peers from now on until `close`.

    Each kind has a `load` of its own (`ServingStage`, `InferenceStage`, `TrainingWorker`). One owner calls, on the loop, in this
    order: `finish` and `take_on` in turn, as often as the owner changes its mind; `drain`, at most once; `close`, also without a
    `drain`; `keep`, at most once. `sections`, `readings`, `bound` and `rest_s` answer at once, at any time before `close`.
    """

    @property
    def bound(self) -> bool:
        """Whether these units hold something that no other node has, so that the node must not leave them for better ones."""
        return False

    async def settled(self) -> None:
        """Wait, for some seconds at most, until nothing is under way that would be lost by leaving now."""
        return

    def rest_s(self) -> float:
        """Return for how many more seconds the stage will be of use; infinite if no end is known."""
        return math.inf

    def sections(self) -> tuple[Section, ...]:
        """Return what the node's announcement says of this stage, as of now."""
        raise NotImplementedError

    def readings(self) -> Readings:
        """Yield the stage's metrics."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Take no new work, and wait without a limit until all that was taken is over.

        The owner may cancel the wait. New work is then still refused until `take_on`.
        """
        return

    def take_on(self) -> None:
        """Take new work again after a `finish`."""
        return

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and give what runs up to `timeout_s` seconds to end or to move to other peers.

        Args:
            timeout_s: After so many seconds the method returns, whatever still runs; `close` then cuts it off.
        """
        raise NotImplementedError

    async def close(self, *, keep_span: bool = False) -> None:
        """End all work and links, and give all memory back.

        Args:
            keep_span: Leave the weights where they are, for a `keep` that follows.
        """
        raise NotImplementedError

    def keep(self, host: MemoryLedger) -> KeptSpan | None:
        """Move the weights of a stage that was closed with `keep_span` into the host's memory. Called on a thread of its own.

        Args:
            host: The host's ledger, in which they are counted from now on.

        Returns:
            The weights; None if this stage keeps none, and then they are freed.
        """
        return None
