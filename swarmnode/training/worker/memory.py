"""Training memory: weights, gradients, the optimiser's memory and the activations of each microbatch, in the device's ledger.

A microbatch is let in where there is room for what it keeps until its gradients come; else its sender hears BUSY. One at a time is
always let in, or training would stand still: its room is kept from the start of the run.
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
from swarmnode.compute.training.optimizer import slots_share
from swarmnode.compute.training.passes import autocast_dtype
from swarmnode.compute.training.segment import Segment
from swarmnode.errors import CheckpointError
from swarmnode.ledger import Account, Full, MemoryLedger, Reservation
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run
from swarmnode.training.worker.pass_estimator import Estimates

log = logging.getLogger(__name__)

IN_FLIGHT = 4  # microbatches at once, in short pipelines
MAX_IN_FLIGHT = 64  # whatever room there is, those of the step to come included
# There and back, of microbatches so small that nobody else counts them.
SMALL_PAYLOADS_BYTES = 2 * MAX_IN_FLIGHT * LARGE_BYTES
CHUNKS_BYTES = 64 << 20  # of all-reduces that are here at any time, at most
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
MAPPED_BYTES = 900_000  # from here on a tensor gets pages of its own
KEPT_BYTES = 256 << 20  # the heap of small things is not cut back


def give_back_large_tensors() -> bool:
    """For this process, for good; False where the C library is not glibc.

    By default glibc puts tensors of up to 32 MB into one heap, where activations of many sizes leave holes: a stage that
    recomputes held 1.6 times what it must, and with this 1.26 times, at 0.77 of the speed (8 layers of 512 in two stages,
    contrib/benchmarks/training_memory.py). GPUs are not concerned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES) and mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def no_estimates(_run: Run) -> Sequence[UnitEstimate]:
    """Of modules of which nothing is known."""
    raise CheckpointError("the work of these units cannot be estimated")


class TrainingMemory:
    """Of one stage, from `begin` of its first run to `close`."""

    def __init__(self, ledger: MemoryLedger, segment: Segment, estimates: Estimates = no_estimates) -> None:
        self.ledger = ledger
        self._segment = segment
        self._estimates = estimates
        self._for_good = {account: ledger.count(account) for account in Account}
        self._microbatch_bytes = 0
        self._for_good[Account.MESSAGES].count(SMALL_PAYLOADS_BYTES)
        self._microbatches: dict[int, Reservation] = {}  # by place
        self._for_good[Account.WEIGHTS].count(segment_bytes(segment))

    def __repr__(self) -> str:
        size = self._microbatch_bytes / 1e6
        return f"<TrainingMemory {len(self._microbatches)} microbatches of {size:.1f} MB, {self.ledger!r}>"

    def begin(self, run: Run) -> bool:
        """A run is about to begin: whether the graphs of some microbatches are too large to be kept, and computed again.

        Then large tensors are given back to the system at once. Where the work cannot be estimated graphs are kept, uncounted.
        """
        try:
            estimates = self._estimates(run)[slice(*self._units)]
        except CheckpointError as error:
            log.info("%s; graphs are kept", error)
            self._microbatch_bytes = 0
            return False
        kept_bytes = sum(unit.activation_bytes for unit in estimates)
        pass_bytes = largest_bytes = max(unit.activation_bytes for unit in estimates)
        if autocast_dtype(self._segment.device, wanted=run.autocast) is torch.float16:
            blocks = (
                self._segment.parameters().values()
            )  # of the largest the gradients, before they are added to the sums
            pass_bytes += max(sum(tensor.nbytes for tensor in named.values()) for named in blocks)
        learning_bytes = (1 + _remembered(run)) * self._for_good[Account.WEIGHTS].size_bytes
        recompute = learning_bytes + IN_FLIGHT * kept_bytes > self._room_bytes()
        if recompute:
            size_mb, room_mb = IN_FLIGHT * kept_bytes / 1e6, (self._room_bytes() - learning_bytes) / 1e6
            log.info("graphs of %.0f MB do not fit into %.0f MB: they are computed again", size_mb, room_mb)
            give_back_large_tensors()
            kept_bytes = sum(unit.boundary_bytes for unit in estimates)
            pass_bytes += largest_bytes  # the graph of a unit is not among what is kept
        self._microbatch_bytes = kept_bytes
        self._for_good[Account.ACTIVATIONS].count(kept_bytes + pass_bytes)  # one microbatch, and the pass that runs
        return recompute

    def hold(self, learner: Learner) -> None:
        """What a learner has besides the weights is here now, instead of an earlier one's."""
        self._for_good[Account.GRADIENTS].count(learner.gradient_bytes)
        self._for_good[Account.OPTIMIZER].count(learner.optimizer_bytes)

    @property
    def gradient_bytes(self) -> int:
        """Of the learner that is here."""
        return self._for_good[Account.GRADIENTS].size_bytes

    def average(self, run: Run, gradient_bytes: int, *, copies: int = 0) -> None:
        """This stage has replicas: what they agree on is a vector as long as the gradients (of all devices, then with a copy of
        them), chunks of it are on their way, and with error feedback there are the residuals of the last step and of this one."""
        vectors = 1 + copies + (2 if feeds_back(run.averaging) else 0)
        self._for_good[Account.AVERAGING].count(vectors * gradient_bytes + min(CHUNKS_BYTES, gradient_bytes))

    def admit(self, place: int) -> bool:
        """Whether there is room for a microbatch at this place (`place_of`); it has it then, until it is `ended`."""
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
        """Microbatches that have room at once, those that are here among them; 0 where nothing is known of their size."""
        if not self._microbatch_bytes:
            return 0
        kept_bytes = sum(reservation.size_bytes for reservation in self._microbatches.values())
        return int(min(MAX_IN_FLIGHT, 1 + (self.ledger.free_bytes + kept_bytes) // self._microbatch_bytes))

    def ended(self, place: int) -> None:
        """A microbatch keeps nothing any more. Safe to call twice."""
        reservation = self._microbatches.pop(place, None)
        if reservation is not None:
            reservation.release()

    def close(self) -> None:
        """Nothing is trained here any more."""
        for reservation in (*self._for_good.values(), *self._microbatches.values()):
            reservation.release()
        self._microbatches.clear()

    @property
    def _units(self) -> Span:
        return Span(self._segment.start, self._segment.end)

    def _room_bytes(self) -> float:
        """What there is beside weights, of which a run before may hold some."""
        own = (Account.GRADIENTS, Account.OPTIMIZER, Account.AVERAGING, Account.ACTIVATIONS)
        return self.ledger.free_bytes + sum(self._for_good[account].size_bytes for account in own)


def segment_bytes(segment: Segment) -> int:
    """Of parameters and buffers, each once."""
    named = (*segment.parameters().values(), *segment.buffers().values())
    return sum({id(tensor): tensor.nbytes for tensors in named for tensor in tensors.values()}.values())


def _remembered(run: Run) -> float:
    """By the optimiser and by replicas that update apart, in sizes of the parameters."""
    return slots_share(run) + (2 if run.averaging.every > 1 else 0)
