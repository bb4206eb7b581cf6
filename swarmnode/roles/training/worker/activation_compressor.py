"""Activation compressor: what a stage's values travel as, link by link and direction by direction."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.values import Encoded, describe_values, encode_values
from swarmnode.errors import UsageError
from swarmnode.ledger import MemoryLedger
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import Choice, Controller, Look
from swarmnode.plan.sparsity import SPARSE_RULES, codec_of, is_allowed, topk_ratio
from swarmnode.roles.training.worker.error_feedback import ErrorFeedback, Link
from swarmnode.roles.training.worker.link_durations import LinkDurations
from swarmnode.swarm.records.run import AUTO, Compression

log = logging.getLogger(__name__)

UNKNOWN = Choice(Codec.NONE, "nothing is known of the link yet")

OnChoice = Callable[[PeerId, str, Choice], None]
"""(peer, direction, choice): what goes there travels otherwise from now on"""


class ActivationCompressor:
    """`mode` is the node's own word, which counts where the run that it is in leaves it to the nodes: "auto" chooses among the
    codecs that the swarm allows, one controller for each link and direction; a codec's name fixes it; "topk", "adatopk" and
    "slowest" are rules of `plan/sparsity.py`."""

    def __init__(self, mode: str, allowed: Collection[int], ledger: MemoryLedger | None = None) -> None:
        if not is_allowed(mode, allowed):
            raise UsageError(f"--compress {mode}: this swarm does not allow it; choose {AUTO}")
        self.on_choice: OnChoice = lambda _peer, _direction, _choice: None
        self._lock = threading.Lock()  # each device of the node has a thread
        self._own = Compression(mode)
        self._allowed = frozenset(allowed)
        self._feedback = ErrorFeedback(ledger or MemoryLedger())
        self._durations = LinkDurations()
        self._beat_s = 0.0  # how long the slowest stage computes
        self._slowest_s = 0.0  # how long the swarm's slowest link takes
        self._asked = self._in_force = self._own
        self._controllers: dict[Link, Controller] = {}
        self._choices: dict[Link, Choice] = {}

    def __repr__(self) -> str:
        return f"<ActivationCompressor {self._in_force.rule}, {len(self._choices)} links, beat {self._beat_s:.3g} s>"

    @property
    def choices(self) -> Mapping[Link, Choice]:
        """By peer and direction."""
        return self._choices.copy()  # at once: the executor adds links meanwhile

    @property
    def allowed(self) -> Collection[int]:
        """Codecs of the swarm."""
        return self._allowed

    @property
    def slowest_link_s(self) -> float:
        """Of this stage's own links, the seconds that a microbatch's values take uncompressed; 0: not known. On the executor."""
        with self._lock:
            return self._durations.slowest_s

    def hear(self, beat_s: float, slowest_link_s: float) -> None:
        """Another step begins, with the coordinator's word on the slowest stage and the slowest link; 0: not known."""
        with self._lock:
            self._beat_s, self._slowest_s = beat_s, slowest_link_s
            self._durations.end_step()

    def adopt(self, asked: Compression) -> None:
        """What the run asks for, on the executor. What the swarm does not allow is not done, whoever asks."""
        with self._lock:
            if asked != self._asked:
                self._adopt(asked)

    def _adopt(self, asked: Compression) -> None:
        self._asked = asked
        self._in_force = asked if asked.rule != AUTO and is_allowed(asked.rule, self._allowed) else self._own
        if asked.rule not in (AUTO, self._in_force.rule):
            log.warning("the run asks for --compress %s, which this swarm does not allow", asked.rule)
        self._controllers.clear()
        self._feedback.clear()

    def arrived(self, values: Sequence[TensorInfo], peer: PeerId, direction: str, bandwidth_bps: float | None) -> None:
        """Values came in from a peer, whose large frames come in as fast as that; on the executor."""
        with self._lock:
            self._durations.note((peer, direction, False), values, bandwidth_bps)

    def encode(self, values: Sequence[Tensor], peer: PeerId, direction: str, bandwidth_bps: float | None) -> Encoded:
        """Descriptors and payloads for a peer; on the executor."""
        link = (peer, direction)
        with self._lock:
            choice = self._choose(describe_values(values), link, bandwidth_bps)
            if self._in_force.feedback:
                return self._feedback.encode(values, link, choice)
        return encode_values(values, choice.codec, choice.keep)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._feedback.clear()

    def _choose(self, infos: Sequence[TensorInfo], link: Link, bandwidth_bps: float | None) -> Choice:
        link_s = self._durations.note((*link, True), infos, bandwidth_bps)
        before = self._choices.get(link, UNKNOWN)
        if self._in_force.rule in SPARSE_RULES:
            choice = self._sparse(link_s)
        else:
            controller = self._controllers.setdefault(link, Controller(self._ladder))
            directions = len({direction for _, direction in self._controllers})
            choice = controller.look(Look(infos, bandwidth_bps, self._beat_s, directions))
        self._choices[link] = choice
        if choice.codec != before.codec:
            self.on_choice(*link, choice)
        return choice

    @property
    def _ladder(self) -> Collection[int]:
        rule = self._in_force.rule
        return self._allowed if rule == AUTO else {codec_of(rule)}

    def _sparse(self, link_s: float | None) -> Choice:
        """Against the slowest link of all, as far as the coordinator has told it; else of this stage's."""
        if link_s is None:
            return UNKNOWN
        rule = self._in_force.rule
        slowest_s = self._slowest_s or self._durations.slowest_s
        ratio = topk_ratio(rule, link_s, slowest_s, self._in_force.ratio)
        if ratio <= 1:
            return Choice(Codec.NONE, f"{rule}: {link_s:.3g} s, where the slowest link takes {slowest_s:.3g} s")
        told = f"{rule} keeps 1 / {ratio:.3g} of the elements: {link_s:.3g} s, where the slowest link takes {slowest_s:.3g} s"
        return Choice(Codec.TOPK, told, 1 / ratio)
