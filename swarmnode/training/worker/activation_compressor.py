"""Activation compressor: it encodes a stage's values for each link and direction, with the error feedback of top-k.

The choice of the codec is that of `plan/compression.py`.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarmnode.codec.tensors import TensorInfo
from swarmnode.compress.codecs import Encoded, decode, describe_values, encode_values, largest_of
from swarmnode.compute.training.saved_activations import LARGEST_SENT, is_finite, is_within
from swarmnode.errors import UsageError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import MICROBATCHES, NARROW, UNKNOWN, Choice, LinkCodecs, is_allowed
from swarmnode.swarm.records.run import AUTO, Compression

log = logging.getLogger(__name__)

FAR = 64.0  # what top-k leaves out is smaller than what it sends, but adds up over microbatches

OnChoice = Callable[[PeerId, str, Choice], None]
"""Callback (peer, direction, choice), called when the codec of a link changes."""


MAX_LINKS = 64  # the least recently used are forgotten

Link = tuple[PeerId, str]
"""Receiver, and direction through the model."""


@dataclass(frozen=True)
class _LeftOver:
    values: Sequence[Tensor]  # of whole numbers: zeros
    memory: Reservation


class ErrorFeedback:
    """Error feedback: values that top-k left out on a link are added to the next values of the link (Stich et al., arXiv
    1809.07599).

    It is used on the executor. If the ledger has no room, nothing is kept, and top-k goes on without feedback.

    The activations of two microbatches come from different samples. A left-out part that is a bias is the same for all
    samples; any other left-out part is noise. `docs/decisions/compression.md` measures which of them prevails.
    """

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self._left: OrderedDict[Link, _LeftOver] = OrderedDict()

    def encode(self, values: Sequence[Tensor], link: Link, choice: Choice) -> Encoded:
        """Encode the values plus the part left out before, and keep the part left out now. Returns descriptors and payloads."""
        wanted = self._with_left_over(values, link)
        infos, payloads = encode_values(wanted, choice.codec, choice.topk_share)
        said = [decode(info, bytes(payload)) for info, payload in zip(infos, payloads, strict=True)]
        self._store(link, [value - told.to(value.device) for value, told in zip(wanted, said, strict=True)])
        return infos, payloads

    def _with_left_over(self, values: Sequence[Tensor], link: Link) -> Sequence[Tensor]:
        """Return the values plus the part left out before, without that part if it is far larger: false values of another hop,
        which went through here before, must not outlast their microbatch."""
        left = self._left.get(link)
        if left is None or [value.shape for value in left.values] != [value.shape for value in values]:
            return values

        def joined(value: Tensor, more: Tensor) -> Tensor:
            is_near = is_within([more], min(FAR * largest_of(value), LARGEST_SENT / 2))
            return value + more.to(value.device) if is_near else value

        return [joined(value, more) for value, more in zip(values, left.values, strict=True)]

    def _store(self, link: Link, left: Sequence[Tensor]) -> None:
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
        """Forget the values that compression left out, for all links."""
        for link in list(self._left):
            self._forget(link)


class ActivationCompressor:
    """The codecs of a stage's values. `mode` is the node's own setting, used if the run leaves the choice to the nodes.

    "auto" chooses among the codecs that the swarm allows, for each link and direction by itself. The name of a
    codec fixes it. "topk", "adatopk" and "slowest" are rules of `plan/compression.py`. `narrow`: the model has a bottleneck.
    Raises UsageError if the swarm does not allow `mode`.
    """

    def __init__(
        self, mode: str, allowed: Collection[int], ledger: MemoryLedger | None = None, *, narrow: bool = False
    ) -> None:
        if not is_allowed(mode, allowed):
            raise UsageError(f"--compress {mode}: this swarm does not allow it; choose {AUTO}")
        self.on_choice: OnChoice = lambda _peer, _direction, _choice: None
        self.allowed = frozenset(allowed)  # codecs of the swarm
        self._lock = threading.Lock()  # each device of the node has a thread
        self._own = self._asked = self._in_force = Compression(mode)
        self.codecs = LinkCodecs[Link](allowed, self._own, NARROW if narrow else MICROBATCHES)
        self._feedback = ErrorFeedback(ledger or MemoryLedger())
        self._beat_s = 0.0  # seconds that the slowest stage computes
        self._slowest_s = 0.0  # seconds that the swarm's slowest link takes

    @property
    def choices(self) -> Mapping[Link, Choice]:
        """The latest choice of a codec, by peer and direction."""
        return self.codecs.choices.copy()  # at once: the executor adds links meanwhile

    @property
    def slowest_link_s(self) -> float:
        """Seconds that a microbatch's values take uncompressed over the slowest of this stage's links; 0 if unknown. Must
        run on the executor."""
        with self._lock:
            return self.codecs.durations.slowest_s

    def begin_step(self, beat_s: float, slowest_link_s: float) -> None:
        """Begin a new step, with the coordinator's seconds of the slowest stage and the slowest link (0: unknown)."""
        with self._lock:
            self._beat_s, self._slowest_s = beat_s, slowest_link_s
            self.codecs.durations.end_step()

    def adopt(self, asked: Compression) -> None:
        """Follow the run's setting. If it is auto, or the swarm does not allow it, the node's own counts. Must run on the
        executor."""
        with self._lock:
            if asked == self._asked:
                return
            self._asked = asked
            self._in_force = asked if asked.rule != AUTO and is_allowed(asked.rule, self.allowed) else self._own
            if asked.rule not in (AUTO, self._in_force.rule):
                log.warning(
                    "the run asks for --compress %s, which this swarm forbids; your node uses its own", asked.rule
                )
            self.codecs.adopt(self._in_force)
            self._feedback.clear()

    def arrived(self, values: Sequence[TensorInfo], peer: PeerId, direction: str, bandwidth_bps: float | None) -> None:
        """Record that values arrived from `peer` at `bandwidth_bps` (None: unknown). Must run on the executor."""
        with self._lock:
            self.codecs.durations.record((peer, direction, "received"), values, bandwidth_bps)

    def encode(self, values: Sequence[Tensor], peer: PeerId, direction: str, bandwidth_bps: float | None) -> Encoded:
        """Encode values for `peer` with the codec of its link. Returns descriptors and payloads. Must run on the executor."""
        link, infos = (peer, direction), describe_values(values)
        with self._lock:
            before = self.codecs.choices.get(link, UNKNOWN)
            directions = len({direction, *(other for _, other in self.codecs.adapted)})
            choice = self.codecs.choose(
                link, infos, bandwidth_bps, self._beat_s, directions=directions, slowest_s=self._slowest_s
            )
            if choice.codec != before.codec:
                self.on_choice(*link, choice)
            if self._in_force.feedback:
                return self._feedback.encode(values, link, choice)
        return encode_values(values, choice.codec, choice.topk_share)

    def close(self) -> None:
        """Free the memory of the error feedback."""
        self._feedback.clear()
