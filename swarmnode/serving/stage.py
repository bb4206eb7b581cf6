"""Stage: the interface of a node (`node/node.py`) to its layers, whether they serve a model, serve a graph or train."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from swarmnode.ledger import MemoryLedger
from swarmnode.metrics.metric import Readings
from swarmnode.swarm.records.announcement import Section

if TYPE_CHECKING:
    from swarmnode.serving.span_part import RetainedSpan


class Stage(Protocol):
    """Layers of a model that are loaded, and that answer requests of other peers until `close`.

    Each kind has its own `load` (`ServingStage`, `InferenceStage`, `TrainingWorker`). One owner calls, in this order:
    `finish` and `reopen` in turn, any number of times; `drain`, at most once; `close`, also without a `drain`; `retain`, at
    most once. All are called on the event loop but `retain`, which blocks and has a thread of its own. `settled` may be
    awaited before `drain` and `close`. `sections`, `readings`, `bound` and `rest_s` answer at once, at any time before
    `close`.
    """

    @property
    def bound(self) -> bool:
        """Whether these layers hold data that no other node has, so that the node must not leave them for better layers."""
        return False

    async def settled(self) -> None:
        """Wait, for a few seconds at most, until leaving would not lose work that is under way."""
        return

    def rest_s(self) -> float:
        """Return the seconds until the stage is of no more use; infinite if no end is known."""
        return math.inf

    def sections(self) -> tuple[Section, ...]:
        """Return the sections of the node's announcement that describe this stage now."""
        raise NotImplementedError

    def readings(self) -> Readings:
        """Yield the metrics of these layers."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Take no new work, and wait without a limit until all accepted work is over.

        The owner may cancel the wait. New work is then still refused until `reopen`.
        """
        return

    def reopen(self) -> None:
        """Accept new work again after `finish` has stopped it; does nothing by default."""
        return

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, and give running work up to `timeout_s` seconds to end or to move to other peers.

        Args:
            timeout_s: Seconds after which the method returns. `close` then cuts off work that still runs.
        """
        raise NotImplementedError

    async def close(self, *, keep_span: bool = False) -> None:
        """End all work and links, and give all memory back.

        Args:
            keep_span: Leave the weights in place, for a `retain` that follows.
        """
        raise NotImplementedError

    def retain(self, host: MemoryLedger) -> RetainedSpan | None:
        """Move the weights of a stage that was closed with `keep_span` into host memory. Called on a thread of its own.

        Args:
            host: Ledger of the host, which counts the weights from now on.

        Returns:
            The weights; None if this stage keeps none, and then they are freed.
        """
        return None
