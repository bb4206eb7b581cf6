"""Training memory: weights, gradients, optimiser states and the activations of each microbatch, in the device's ledger.

A microbatch is admitted if there is room for the activations that it keeps until its gradients come; else its sender
receives BUSY. One microbatch is always admitted, or training would stand still: its room is kept from the start of the run.

Pass estimator and layer time: the seconds of a microbatch on one device, estimated before the first one, and timed afterwards.

The work of the passes at measured rates tells which layers are alike, and their time relative to each other. A dummy run tells the
real time: rates do not include the effect of caches, allocators and calls on a whole pass.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from swarmnode.codec.frames import LARGE_BYTES
from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import MEASURING_BYTES, Rates
from swarmnode.compute.stopwatch import TRAINING_WORK, Throttle
from swarmnode.compute.training.averaging.gradient_compressor import feeds_back
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.optimizer import memory_bytes
from swarmnode.compute.training.passes import autocast_dtype
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run

log = logging.getLogger(__name__)

NEWEST = 0.1  # weight of the newest measurement, once there are enough
LONG_S = 2.0  # estimated seconds: longer microbatches are not tried as a whole, which takes two passes

Estimates = Callable[[Run], Sequence[UnitEstimate]]
"""Function that estimates a microbatch of a run in each unit of the model. Raises CheckpointError if the work cannot be
estimated."""

MeasureRates = Callable[[torch.device, "torch.dtype | None"], Rates]
"""Function (device, dtype of autocast) that measures rates."""

DummyRun = Callable[[Learner, int, int], float]
"""Function that returns the seconds for a microbatch through units [start, end). Raises CheckpointError, ProtocolError or
NotFinite if no inputs can be made up."""


class UnitTime:
    """Seconds of a microbatch in one layer, forward and backward. Until passes have been timed it is the estimate, corrected by the
    error of the last run's. Then it is a weighted mean of the timed passes; newer ones count more."""

    def __init__(self) -> None:
        self._estimated_s = 0.0
        self._corrected = 1.0  # correction of the current estimate
        self._one_way_s = 0.0
        self._passes = 0

    @property
    def unit_s(self) -> float:
        """The timed seconds, else the expected ones; 0 before either is known."""
        return self.timed_s or self.expected_s

    @property
    def timed_s(self) -> float:
        """Timed seconds of a forward and a backward pass; 0 before two passes have been timed."""
        return 2 * self._one_way_s if self._passes > 1 else 0.0

    @property
    def expected_s(self) -> float:
        """Seconds expected when the run began; 0 if nothing could be estimated."""
        return self._estimated_s * self._corrected

    @property
    def correction(self) -> float:
        """Ratio of the timed to the estimated time; the last known one, or 1, before passes have been timed."""
        return self.timed_s / self._estimated_s if self.timed_s and self._estimated_s else self._corrected

    def begin(self, estimated_s: float) -> None:
        """Begin a run whose microbatches are estimated to take `estimated_s` for a layer. Earlier timings are of other
        microbatches and dropped."""
        self._corrected = self.correction
        self._estimated_s, self._one_way_s, self._passes = estimated_s, 0.0, 0

    def record(self, units: int, pass_s: float) -> None:
        """Record a pass through `units` layers, forward or backward, that took `pass_s`. There are as many of each."""
        self._passes += 1
        self._one_way_s += (pass_s / units - self._one_way_s) * max(NEWEST, 1 / self._passes)


@dataclass(eq=False)
class PassEstimator:
    """Estimator for one device as `throttle` lends it. Used on the device's thread: rates are measured on first use."""

    device: torch.device
    estimates: Estimates
    measure: MeasureRates
    dummy_run: DummyRun
    ledger: MemoryLedger
    _: KW_ONLY
    throttle: Throttle = field(default_factory=Throttle)

    def __post_init__(self) -> None:
        self._rates: dict[torch.dtype | None, Rates] = {}

    def __repr__(self) -> str:
        return f"<PassEstimator of {self.device}, {len(self._rates)} rates measured>"

    def unit_s(self, learner: Learner) -> float:
        """Return the seconds for one layer of the learner, forward and backward, in its run. The learner must not have counted
        anything yet. Returns 0 if the work cannot be estimated or there is no memory to measure in."""
        units = Span(learner.segment.start, learner.segment.end)
        try:
            # Estimate the seconds of each layer from its work.
            estimates = self.estimates(learner.run)[slice(*units)]
            dtype = autocast_dtype(self.device, wanted=learner.run.autocast)
            if dtype not in self._rates:
                with self.ledger.reserve(Account.ACTIVATIONS, MEASURING_BYTES):
                    self._rates[dtype] = self.measure(self.device, dtype)
            rates = self._rates[dtype]
            estimates_s = [one.learning_s(rates) + learner.recompute * rates.seconds(one.forward) for one in estimates]
        except (CheckpointError, Full) as error:
            log.info("%s; its duration is known once it has been timed", error)
            return 0.0
        passes_s = sum(estimates_s)
        if learner.step < learner.run.steps:  # behind the last step no microbatch is trained, so that none can be tried
            try:
                passes_s = self._tried_s(learner, units, estimates_s)
            except (CheckpointError, ProtocolError, NotFinite) as error:
                log.info("no dummy run: %s", error)
        least_s = self.throttle.least_of_work_s(TRAINING_WORK * learner.run.positions)
        return self.throttle.lent_s(passes_s / units.units, least_s)

    def _tried_s(self, learner: Learner, units: Span, estimates_s: Sequence[float]) -> float:
        """Return the seconds of all layers, timed. If they are estimated to take long, only one layer of each estimate is timed:
        equal layers have equal estimates."""
        if sum(estimates_s) <= LONG_S:
            return self.dummy_run(learner, *units)
        one_of = dict(zip(estimates_s, range(*units), strict=True))
        tried_s = {estimate_s: self.dummy_run(learner, unit, unit + 1) for estimate_s, unit in one_of.items()}
        return sum(tried_s[estimate_s] for estimate_s in estimates_s)


IN_FLIGHT = 4  # microbatches at once in short pipelines
MAX_IN_FLIGHT = 64  # however much room there is, those of the next step included
# Sent and received, of microbatches so small that their payloads are counted nowhere else.
SMALL_PAYLOADS_BYTES = 2 * MAX_IN_FLIGHT * LARGE_BYTES
CHUNKS_BYTES = 64 << 20  # largest size of all-reduce chunks in memory at any time
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
MAPPED_BYTES = 900_000  # a tensor of this size or more gets pages of its own
KEPT_BYTES = 256 << 20  # the heap of small objects is not trimmed below this


def give_back_large_tensors() -> bool:
    """Make glibc return freed large tensors to the system, for the rest of this process. Returns False if the C library is
    not glibc.

    By default glibc puts tensors of up to 32 MB into one heap, where activations of many sizes leave holes: a stage that
    recomputes held 1.6 times the memory it must, and with this 1.26 times, at 0.77 of the speed (8 layers of 512 in two
    stages, contrib/benchmarks/training_memory.py). GPU memory is not concerned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def no_estimates(_run: Run) -> Sequence[UnitEstimate]:
    """Raise CheckpointError: the default for segments whose work cannot be estimated."""
    raise CheckpointError("the work of these layers cannot be estimated; use another model")


class TrainingMemory:
    """The memory of one stage in the ledger, from its creation to `close`."""

    def __init__(self, ledger: MemoryLedger, segment: Segment, estimates: Estimates = no_estimates) -> None:
        self.ledger = ledger
        self._segment = segment
        self._estimates = estimates
        self._for_good = {account: ledger.count(account) for account in Account}
        self._microbatch_bytes = 0
        self._for_good[Account.MESSAGES].count(SMALL_PAYLOADS_BYTES)
        self._microbatches: dict[int, Reservation] = {}  # by place
        self._for_good[Account.WEIGHTS].count(segment_bytes(segment))

    def begin(self, run: Run) -> bool:
        """Reserve memory for a run. Returns whether activations must be recomputed, because the graphs of IN_FLIGHT
        microbatches do not fit.

        In that case, freed large tensors are returned to the system at once. If the work cannot be estimated, graphs are
        kept without being counted, and the result is False.
        """
        try:
            estimates = self._estimates(run)[self._segment.start : self._segment.end]
        except CheckpointError as error:
            log.info("%s; your node keeps all activations", error)
            self._microbatch_bytes = 0
            return False
        mask_bytes = self._segment.mask_bytes(run)  # that all layers of a pass share
        kept_bytes = mask_bytes + sum(unit.activation_bytes for unit in estimates)
        pass_bytes = largest_bytes = mask_bytes + max(unit.activation_bytes for unit in estimates)
        if autocast_dtype(self._segment.device, wanted=run.autocast) is torch.float16:
            # of the block with the most, before they are added to the sums
            blocks = self._segment.parameters().values()
            pass_bytes += max(sum(tensor.nbytes for tensor in named.values()) for named in blocks)
        # The memory of the optimiser, and of the outer one if replicas update apart.
        outer_bytes = 2 * segment_bytes(self._segment) if run.averaging.every > 1 else 0
        remembered_bytes = outer_bytes + sum(memory_bytes(run, named) for named in self._segment.parameters().values())
        learning_bytes = self._for_good[Account.WEIGHTS].size_bytes + remembered_bytes
        recompute = learning_bytes + IN_FLIGHT * kept_bytes > self._room_bytes()
        if recompute:
            size_mb, room_mb = IN_FLIGHT * kept_bytes / 1e6, (self._room_bytes() - learning_bytes) / 1e6
            log.info("activations of %.0f MB do not fit into %.0f MB: your node recomputes them", size_mb, room_mb)
            give_back_large_tensors()
            kept_bytes = sum(unit.boundary_bytes for unit in estimates)
            pass_bytes += largest_bytes  # the graph that is recomputed is not among the kept ones
        self._microbatch_bytes = kept_bytes
        self._for_good[Account.ACTIVATIONS].count(kept_bytes + pass_bytes)  # one microbatch, and the pass under way
        return recompute

    def hold(self, learner: Learner) -> None:
        """Count the memory of a learner besides the weights, in place of that of an earlier learner."""
        self._for_good[Account.GRADIENTS].count(learner.gradient_bytes)
        self._for_good[Account.OPTIMIZER].count(learner.optimizer_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the current learner's gradients."""
        return self._for_good[Account.GRADIENTS].size_bytes

    def average(self, run: Run, gradient_bytes: int, *, copies: int = 0) -> None:
        """Count the memory for averaging with replicas. There is a vector as long as the gradients, and `copies` more if several
        devices take part. Chunks are in transit. Error feedback keeps the residuals of the last step and of this one."""
        vectors = 1 + copies + (2 if feeds_back(run.averaging) else 0)
        self._for_good[Account.AVERAGING].count(vectors * gradient_bytes + min(CHUNKS_BYTES, gradient_bytes))

    def admit(self, place: int) -> bool:
        """Reserve memory for the microbatch with the number `place` (from `place_of`) until it is `ended`. Returns False if there
        is no room."""
        if place in self._microbatches:
            return True
        first = not self._microbatches
        try:
            self._microbatches[place] = self.ledger.reserve(Account.ACTIVATIONS, 0 if first else self._microbatch_bytes)
        except Full:
            return False
        return True

    @property
    def window(self) -> int:
        """Number of microbatches that have room at once, present ones included; 0 if their size is unknown."""
        if not self._microbatch_bytes:
            return 0
        kept_bytes = sum(reservation.size_bytes for reservation in self._microbatches.values())
        return int(min(MAX_IN_FLIGHT, 1 + (self.ledger.free_bytes + kept_bytes) // self._microbatch_bytes))

    def ended(self, place: int) -> None:
        """Free the memory of the microbatch at `place`. Safe to call twice."""
        reservation = self._microbatches.pop(place, None)
        if reservation is not None:
            reservation.release()

    def close(self) -> None:
        """Free all memory of the stage."""
        for reservation in (*self._for_good.values(), *self._microbatches.values()):
            reservation.release()
        self._microbatches.clear()

    def _room_bytes(self) -> float:
        """Return the bytes available beside the weights, including those that an earlier run still holds."""
        own = (Account.GRADIENTS, Account.OPTIMIZER, Account.AVERAGING, Account.ACTIVATIONS)
        return self.ledger.free_bytes + sum(self._for_good[account].size_bytes for account in own)


def segment_bytes(segment: Segment) -> int:
    """Return the bytes of the segment's parameters and buffers, each tensor counted once."""
    named = (*segment.parameters().values(), *segment.buffers().values())
    return sum({id(tensor): tensor.nbytes for tensors in named for tensor in tensors.values()}.values())
