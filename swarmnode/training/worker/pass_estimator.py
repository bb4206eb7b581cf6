"""Pass estimator and layer time: the seconds of a microbatch on one device, estimated before the first one, and timed afterwards.

The work of the passes at measured rates tells which layers are alike, and their time relative to each other. A dummy run tells the
real time: rates do not include the effect of caches, allocators and calls on a whole pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import MEASURING_BYTES, Rates
from swarmnode.compute.stopwatch import TRAINING_WORK, Throttle
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.passes import autocast_dtype
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger
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

    def note(self, units: int, pass_s: float) -> None:
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
            estimates_s = self._estimates_s(learner.run, units, recompute=learner.recompute)
        except (CheckpointError, Full) as error:
            log.info("%s; its duration is known once it has been timed", error)
            return 0.0
        try:
            passes_s = self._tried_s(learner, units, estimates_s)
        except (CheckpointError, ProtocolError, NotFinite) as error:
            log.info("no dummy run: %s", error)
            passes_s = sum(estimates_s)
        least_s = self.throttle.least_of_work_s(TRAINING_WORK * learner.run.positions)
        return self.throttle.lent_s(passes_s / units.units, least_s)

    def _estimates_s(self, run: Run, units: Span, *, recompute: bool) -> list[float]:
        """Estimate the seconds of each layer from its work."""
        estimates = self.estimates(run)[slice(*units)]
        rates = self._rates_of(autocast_dtype(self.device, wanted=run.autocast))
        return [one.learning_s(rates) + recompute * rates.seconds(one.forward) for one in estimates]

    def _tried_s(self, learner: Learner, units: Span, estimates_s: Sequence[float]) -> float:
        """Return the seconds of all layers, timed. If they are estimated to take long, only one layer of each estimate is timed:
        equal layers have equal estimates."""
        if sum(estimates_s) <= LONG_S:
            return self.dummy_run(learner, *units)
        one_of = dict(zip(estimates_s, range(*units), strict=True))
        tried_s = {estimate_s: self.dummy_run(learner, unit, unit + 1) for estimate_s, unit in one_of.items()}
        return sum(tried_s[estimate_s] for estimate_s in estimates_s)

    def _rates_of(self, dtype: torch.dtype | None) -> Rates:
        if dtype not in self._rates:
            with self.ledger.reserve(Account.ACTIVATIONS, MEASURING_BYTES):
                self._rates[dtype] = self.measure(self.device, dtype)
        return self._rates[dtype]
