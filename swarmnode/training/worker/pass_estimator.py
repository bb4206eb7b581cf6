"""Pass estimator and unit time: the seconds of a microbatch on one device, estimated before any was computed, and timed afterwards.

The work of its passes at measured rates says which units are alike, and how long all take. A dummy run says how long they really
do: rates know nothing of what caches, allocators and calls make of a whole pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

import torch

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import MEASURING_BYTES, Rates
from swarmnode.compute.throttle import TRAINING_WORK, Throttle
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.passes import autocast_dtype
from swarmnode.errors import CheckpointError, NotFinite, ProtocolError
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run

log = logging.getLogger(__name__)

NEWEST = 0.1  # weight of the newest measurement, once there are enough
LONG_S = 2.0  # estimated: longer microbatches are not tried as a whole, which takes two of them

Estimates = Callable[[Run], Sequence[UnitEstimate]]
"""Of all units of the model, for a microbatch of a run. Raises CheckpointError where the work cannot be estimated."""

MeasureRates = Callable[[torch.device, "torch.dtype | None"], Rates]
"""(device, dtype of autocast)"""

DummyRun = Callable[[Learner, int, int], float]
"""Seconds for a microbatch through units [start, end). Raises CheckpointError, ProtocolError, NotFinite where none can be made
up."""


class UnitTime:
    """Seconds that a microbatch takes for one unit, forward and back. Until a pass was timed they are the estimate, as far off
    as the last run's was; then the mean of what was timed, of which the newest counts most."""

    def __init__(self) -> None:
        self._estimated_s = 0.0
        self._corrected = 1.0  # the estimate in force
        self._one_way_s = 0.0
        self._passes = 0

    def __repr__(self) -> str:
        return f"<UnitTime {self.unit_s:.4f} s, {self.expected_s:.4f} s expected>"

    @property
    def unit_s(self) -> float:
        """0 before anything was timed or estimated."""
        return self.timed_s or self.expected_s

    @property
    def timed_s(self) -> float:
        """0 before anything was timed: of a pass there, and one back."""
        return 2 * self._one_way_s if self._passes > 1 else 0.0

    @property
    def expected_s(self) -> float:
        """When the run began; 0 where nothing could be estimated."""
        return self._estimated_s * self._corrected

    @property
    def correction(self) -> float:
        """How many times as long as estimated it takes, as far as that is known."""
        return self.timed_s / self._estimated_s if self.timed_s and self._estimated_s else self._corrected

    def begin(self, estimated_s: float) -> None:
        """A run begins, whose microbatches are estimated to take a unit so long: what was timed is of other ones."""
        self._corrected = self.correction
        self._estimated_s, self._one_way_s, self._passes = estimated_s, 0.0, 0

    def note(self, units: int, pass_s: float) -> None:
        """A pass through so many units, there or back, took so long: there are as many of each."""
        self._passes += 1
        self._one_way_s += (pass_s / units - self._one_way_s) * max(NEWEST, 1 / self._passes)


@dataclass(eq=False)
class PassEstimator:
    """Estimates for one device as a `throttle` lends it. Used on its thread: rates are measured when first asked for."""

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
        """Seconds for one of a learner's units, there and back, in its run; 0 where work cannot be estimated, or there is no memory
        to measure in. For one that has counted nothing yet."""
        units = Span(learner.segment.start, learner.segment.end)
        try:
            estimates_s = self._estimates_s(learner.run, units, recompute=learner.recompute)
        except (CheckpointError, Full) as error:
            log.info("%s; how long it takes is known when it was timed", error)
            return 0.0
        try:
            passes_s = self._tried_s(learner, units, estimates_s)
        except (CheckpointError, ProtocolError, NotFinite) as error:
            log.info("no dummy run: %s", error)
            passes_s = sum(estimates_s)
        least_s = self.throttle.least_of_work_s(TRAINING_WORK * learner.run.positions)
        return self.throttle.lent_s(passes_s / units.units, least_s)

    def _estimates_s(self, run: Run, units: Span, *, recompute: bool) -> list[float]:
        """Of each unit, by its work."""
        estimates = self.estimates(run)[slice(*units)]
        rates = self._rates_of(autocast_dtype(self.device, wanted=run.autocast))
        return [one.learning_s(rates) + recompute * rates.seconds(one.forward) for one in estimates]

    def _tried_s(self, learner: Learner, units: Span, estimates_s: Sequence[float]) -> float:
        """Of all units. Where that takes long, one of those is tried that are estimated alike: of layers that are the same."""
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
