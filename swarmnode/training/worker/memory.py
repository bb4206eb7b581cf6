"""Training memory: weights, gradients, optimiser states and the activations of each microbatch, in the device's ledger.

A microbatch is admitted if there is room for the activations that it keeps until its gradients come; else its sender
receives BUSY. One microbatch is always admitted, or training would stand still: its room is kept from the start of the run.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch

from swarmnode.codec.frames import LARGE_BYTES
from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.training.averaging.gradient_compressor import feeds_back
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.optimizer import memory_bytes
from swarmnode.compute.training.passes import autocast_dtype
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import CheckpointError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.pass_estimator import Estimates

log = logging.getLogger(__name__)

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
            estimates = self._estimates(run)[slice(*self._units)]
        except CheckpointError as error:
            log.info("%s; your node keeps all activations", error)
            self._microbatch_bytes = 0
            return False
        mask_bytes = self._segment.mask_bytes(run)  # that all layers of a pass share
        kept_bytes = mask_bytes + sum(unit.activation_bytes for unit in estimates)
        pass_bytes = largest_bytes = mask_bytes + max(unit.activation_bytes for unit in estimates)
        if autocast_dtype(self._segment.device, wanted=run.autocast) is torch.float16:
            blocks = (
                self._segment.parameters().values()
            )  # of the block with the most, before they are added to the sums
            pass_bytes += max(sum(tensor.nbytes for tensor in named.values()) for named in blocks)
        learning_bytes = self._for_good[Account.WEIGHTS].size_bytes + _remembered_bytes(self._segment, run)
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

    @property
    def _units(self) -> Span:
        return Span(self._segment.start, self._segment.end)

    def _room_bytes(self) -> float:
        """Return the bytes available beside the weights, including those that an earlier run still holds."""
        own = (Account.GRADIENTS, Account.OPTIMIZER, Account.AVERAGING, Account.ACTIVATIONS)
        return self.ledger.free_bytes + sum(self._for_good[account].size_bytes for account in own)


def segment_bytes(segment: Segment) -> int:
    """Return the bytes of the segment's parameters and buffers, each tensor counted once."""
    named = (*segment.parameters().values(), *segment.buffers().values())
    return sum({id(tensor): tensor.nbytes for tensors in named for tensor in tensors.values()}.values())


def _remembered_bytes(segment: Segment, run: Run) -> float:
    """Return the bytes of the optimiser's memory, and of the outer one's if replicas update apart."""
    outer_bytes = 2 * segment_bytes(segment) if run.averaging.every > 1 else 0
    return outer_bytes + sum(memory_bytes(run, named) for named in segment.parameters().values())
