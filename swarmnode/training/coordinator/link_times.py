"""Link times: a coordinator's estimates of the links between stages, from their announcements.

Stages announce measured round trips, coordinates, the rates of their lines, and the codecs that they use.

Answer times: how long a coordinator waits for each kind of answer, from the time that earlier answers took.

Failures and failed attempts: the peers that failed lately and are left alone for a while, and work that fails at every stage.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from swarmnode import tolerances
from swarmnode.codec.body import SHARED
from swarmnode.codec.frames import FrameKind
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.errors import ErrorCode
from swarmnode.net.addressing.addresses import home_of
from swarmnode.net.clock import Backoff, Deadline, Expectation
from swarmnode.net.interfaces import PeerId
from swarmnode.peer.findings_record import Findings
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.plan.cost import transfer_s
from swarmnode.plan.findings import Kind
from swarmnode.plan.routes.delays import HomeLines, bandwidths, one_way_delays, shared_homes
from swarmnode.plan.spans.flow import Floats
from swarmnode.plan.training.averaging import averaged_bytes
from swarmnode.plan.view import View, view_of
from swarmnode.swarm.peers.directory import Directory
from swarmnode.swarm.records.announcement import peer_digest
from swarmnode.swarm.records.run import Averaging


@dataclass(eq=False)
class LinkTimes:
    """Transfer times between the peers of one swarm. `width`: values of a position between stages, or of a module's sample; if it
    is 0 only delays count. `parameters`: number of parameters of each layer, empty if unknown. `matrix_width`: that of the layers'
    matrices; 0: `width`. `clock`: seconds."""

    directory: Directory
    units: int
    width: int
    parameters: Sequence[float] = ()
    _: KW_ONLY
    matrix_width: int = 0
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._home_lines = HomeLines(self.clock)

    def __repr__(self) -> str:
        return f"<LinkTimes of {len(self.directory.peers())} peers, {self.width} values a position>"

    def between(self, peers: Sequence[PeerId], positions: int) -> tuple[Floats, Floats]:
        """Return two matrices [N, N] of seconds from each peer to each other: the delay, and the sending time of a
        microbatch of `positions` positions."""
        announced = self.directory.peers()
        view = self._view()
        delay_NN = one_way_delays(view, peers)
        sends = [announced[peer].sends if peer in announced else {} for peer in peers]
        receivers = [peer_digest(peer) for peer in peers]
        values = TensorInfo(Codec.NONE, DType.FLOAT32, (positions, self.width))
        size_bytes = {int(codec): float(encoded_bytes([values], codec)) for codec in LADDER}
        plain_bytes = size_bytes[Codec.NONE]
        # The codec that each sender announces for each receiver counts, else none.
        size_NN = np.array([[size_bytes.get(said.get(there, 0), plain_bytes) for there in receivers] for said in sends])
        return delay_NN, transfer_s(size_NN, np.zeros_like(delay_NN), bandwidths(view, peers))

    def _view(self) -> View:
        """Return the view of all announcements. A line that several peers share keeps its highest recent rate."""
        view = view_of(self.units, self.directory.peers().values())
        return self._home_lines.held(view, view.peers)

    def homes(self, peers: Sequence[PeerId]) -> tuple[int, ...]:
        """Return a number for each peer; peers behind the same line, by their announced addresses, have the same number. Returns an
        empty tuple if no two peers share a line."""
        announced = self.directory.peers()
        addresses = [announced[peer].addresses if peer in announced else () for peer in peers]
        return shared_homes([home_of(own) or peer for peer, own in zip(peers, addresses, strict=True)])

    def line_bps(self, peer: PeerId) -> float:
        """Return the rate of a stage's line in bits/s, the lower of up and down, as it announces it; 0 if it measured neither."""
        announced = self.directory.peers().get(peer)
        ways = (0.0, 0.0) if announced is None else (announced.up_bps, announced.down_bps)
        return min((bps for bps in ways if bps > 0), default=0.0)

    def paths_bps(self, peers: Sequence[PeerId]) -> Floats:
        """Return the bits/s [from, to] at which large frames arrived, as senders announce; 0 if unknown."""
        path_bps = self._view().path_bps
        return np.array([[path_bps.get((here, there), 0.0) for there in peers] for here in peers], dtype=float)

    def averaged_bytes(self, blocks: Sequence[int], how: Averaging) -> float:
        """Estimate the encoded bytes of the gradients of these blocks; 0 if the parameters are unknown. The shared block
        counts as the larger of both ends."""
        if not self.parameters:
            return 0.0
        ends = max(self.parameters[0], self.parameters[-1])
        parameters = sum(ends if block == SHARED else self.parameters[block] for block in blocks)
        return averaged_bytes(int(parameters), self.matrix_width or max(1, self.width), how)


SILENCE_S = 5.0  # without a word of a coordinator, which sends one each second
STALLED_S = 60.0  # without any work, while there are trainers and every unit has a holder
SAVE_S = 120.0  # for a step of gigabytes to be written to a slow disk
CLEANUP = 2.0  # times a lease's deadline, after which a hop forgets the lease by itself: its coordinator is gone, too
STATES = Deadline(floor_s=10.0, ceiling_s=600.0)  # gigabytes are loaded or written
ROUND = Deadline(floor_s=5.0, ceiling_s=900.0)
RULES = {
    FrameKind.BEGIN: (30.0, STATES),
    FrameKind.RESTORE: (30.0, STATES),
    FrameKind.COMMIT: (30.0, Deadline(floor_s=5.0, ceiling_s=600.0)),
    FrameKind.REDUCE: (15.0, ROUND),
    FrameKind.LEASE: (15.0, ROUND),
}
"""Expected seconds while nothing is measured, and the deadline rule, by kind of command."""

ANSWER = (5.0, Deadline(floor_s=3.0, ceiling_s=300.0))  # any other command: it is done after the pass under way


class AnswerTimes:
    """Times of the answers of one peer, or (for all-reduces and leases) of all peers together."""

    def __init__(self) -> None:
        self._durations: defaultdict[FrameKind, Expectation] = defaultdict(Expectation)
        self._stretch: defaultdict[FrameKind, float] = defaultdict(lambda: 1.0)

    def record(self, kind: FrameKind, seconds: float) -> None:
        """Record that an answer of this kind took `seconds`. Ends the stretching of its deadline."""
        self._durations[kind].record(seconds)
        self._stretch[kind] = 1.0

    def stretch(self, kind: FrameKind) -> None:
        """Double the next deadlines of this kind after an answer that was late without anyone's fault, so that slow work is
        done, too."""
        self._stretch[kind] *= 2

    def wait_s(self, kind: FrameKind, *, rtt_s: float = 0.0, work_s: float = 0.0) -> float:
        """Return the seconds to wait for an answer. `work_s` is known computing time before the answer."""
        unmeasured_s, rule = RULES.get(kind, ANSWER)
        taken_s = self._durations[kind].bound
        usual_s = unmeasured_s if taken_s is None else taken_s
        return rule.wait_s(rtt_s=rtt_s, work_s=max(usual_s, work_s)) * self._stretch[kind]


class Failures(Backoff):
    """Failures of peers at the work of one coordinator, kept over its terms. `clock` returns seconds.

    A peer rests after a failure, twice as long after each further one in a row. `findings` gets the peers that are left out.
    """

    def __init__(self, clock: Callable[[], float], findings: Findings | None = None) -> None:
        super().__init__(clock)
        self._findings = findings
        self._in_a_row: Counter[PeerId] = Counter()
        self._banned: dict[PeerId, None] = {}

    def record(self, peer: PeerId) -> int:
        """Record a failure of `peer` and return its number of consecutive failures. Failures during the pause after an
        earlier one do not count again."""
        if not self.rests(peer):
            self.failed(peer)
            self._in_a_row[peer] += 1
        return self._in_a_row[peer]

    def leave_out(self, peer: PeerId, reason: str) -> None:
        """Record that the coordinator goes on without `peer`, until it comes anew."""
        if self._findings is not None:
            self._findings.add(peer, Kind.LEFT_OUT, reason)

    def ban(self, peer: PeerId) -> None:
        """Exclude `peer` from this training for good."""
        self._banned[peer] = None

    @property
    def banned(self) -> tuple[PeerId, ...]:
        """The banned peers, in the order of their bans."""
        return tuple(self._banned)

    def forgive(self, peer: PeerId) -> None:
        """Record a success of `peer`: its failures and its back-off end."""
        self.succeeded(peer)
        self._in_a_row.pop(peer, None)

    def in_a_row(self, peer: PeerId) -> int:
        """Return the number of failures of `peer` since its last success."""
        return self._in_a_row[peer]

    def rests(self, peer: PeerId) -> bool:
        """Return whether `peer` is banned or in a pause after a failure."""
        return self.pause_s(peer) > 0

    def pause_s(self, peer: PeerId) -> float:
        """Return the seconds until `peer` may be asked again; 0 if it may be now, infinite if it is banned."""
        return math.inf if peer in self._banned else super().pause_s(peer)


ALL_REDUCE, ANY = -1, -2  # in place of a microbatch's number
LASTING = frozenset(
    {ErrorCode.INTERNAL, ErrorCode.MALFORMED, ErrorCode.TOO_LARGE, ErrorCode.INVALID_REQUEST, ErrorCode.NOT_FINITE}
)
"""Lasting reasons, which a stage gives for itself. Others are temporary: a peer is lost, busy or at another step."""


class FailedAttempts:
    """Attempts of one step that failed for a lasting reason, by microbatch and stage, and the trainers that reported them.

    ANY counts all failures of a stage since its last success, so that a stage that fails everything is found no later than
    a stage that fails a certain microbatch.
    """

    def __init__(self) -> None:
        self._by_stage: defaultdict[int, Counter[PeerId]] = defaultdict(Counter)
        self._reporters: defaultdict[int, set[PeerId]] = defaultdict(set)
        self.code = 0  # of the latest failure

    @property
    def peers(self) -> set[PeerId]:
        """Peers whose stages have failed attempts at work."""
        return {peer for by_stage in self._by_stage.values() for peer in by_stage}

    def record(self, number: int, peer: PeerId, code: int, trainer: PeerId | None = None) -> None:
        """Count a failed attempt of `peer` at microbatch `number`, or at the all-reduce (ALL_REDUCE). Ignores temporary reasons.
        `trainer` reported it; None if the stage did."""
        if code not in LASTING and code in ErrorCode._value2member_map_:
            return
        self.code = code
        for key in (number,) if trainer is None else (number, ANY):
            self._by_stage[key][peer] += 1
            if trainer is not None:
                self._reporters[key].add(trainer)

    def forget(self, number: int, peers: Collection[PeerId]) -> None:
        """Forget the failures of microbatch `number`, and those of `peers`, whose stages have now computed it."""
        self._by_stage.pop(number, None)
        self._reporters.pop(number, None)
        for peer in peers:
            self._by_stage[ANY].pop(peer, None)

    def hopeless_unit(self, holders: Sequence[Collection[PeerId]], trainers: Collection[PeerId]) -> int | None:
        """Return the first layer whose `holders` have all failed ATTEMPTS times at the same work; None if there is none. The word
        of one trainer is not enough: each of `trainers` must have reported such failures. Failures of the all-reduce need none."""
        for number, by_stage in self._by_stage.items():
            if number != ALL_REDUCE and not self._reporters[number].issuperset(trainers):
                continue
            for unit, peers in enumerate(holders):
                if peers and all(by_stage[peer] >= tolerances.ATTEMPTS for peer in peers):
                    return unit
        return None
