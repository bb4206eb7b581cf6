"""Error feedback: what top-k left out of the values of a link is added to the next ones (Stich et al., arXiv 1809.07599).

A microbatch's activations are of other samples than the next one's. What was left out of them is the same for all samples where it
is a bias, and noise where it is not: which of them prevails is measured in `docs/decisions/compression.md`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnode.compress.codecs import decode
from swarmnode.compress.values import Encoded, encode_values
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import Choice

MAX_LINKS = 64  # those used longest ago are forgotten

Link = tuple[PeerId, str]
"""To whom, and which way through the model"""


@dataclass(frozen=True)
class _LeftOver:
    values: Sequence[Tensor]  # of whole numbers: zeros
    memory: Reservation


class ErrorFeedback:
    """On the executor. Where the ledger has no room, nothing is kept, and top-k goes on without."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._left: OrderedDict[Link, _LeftOver] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ErrorFeedback of {len(self._left)} links>"

    def encode(self, values: Sequence[Tensor], link: Link, choice: Choice) -> Encoded:
        """Descriptors and payloads of the values and what was left out before; keeps what is left out now."""
        wanted = self._with_left_over(values, link)
        infos, payloads = encode_values(wanted, choice.codec, choice.keep)
        said = [decode(info, bytes(payload)) for info, payload in zip(infos, payloads, strict=True)]
        self._keep(link, [value - told.to(value.device) for value, told in zip(wanted, said, strict=True)])
        return infos, payloads

    def _with_left_over(self, values: Sequence[Tensor], link: Link) -> Sequence[Tensor]:
        left = self._left.get(link)
        if left is None or [value.shape for value in left.values] != [value.shape for value in values]:
            return values
        return [value + more.to(value.device) for value, more in zip(values, left.values, strict=True)]

    def _keep(self, link: Link, left: Sequence[Tensor]) -> None:
        self._forget(link)
        if not is_finite(left):
            return
        if len(self._left) >= MAX_LINKS:
            self._forget(next(iter(self._left)))
        try:
            memory = self._ledger.reserve(Account.ACTIVATIONS, sum(value.nbytes for value in left))
        except Full:
            return
        self._left[link] = _LeftOver(left, memory)

    def _forget(self, link: Link) -> None:
        left = self._left.pop(link, None)
        if left is not None:
            left.memory.release()

    def clear(self) -> None:
        """Forget it all."""
        for link in list(self._left):
            self._forget(link)
