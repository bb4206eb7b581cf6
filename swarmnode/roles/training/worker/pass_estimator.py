"""Pass estimator: what a microbatch will take this device, before any was computed: the work of its passes at measured rates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from swarmnode.compute.graph.costs.estimate import UnitEstimate
from swarmnode.compute.graph.costs.rates import MEASURING_BYTES, Rates
from swarmnode.compute.training.precision import autocast_dtype
from swarmnode.errors import CheckpointError
from swarmnode.ledger import Account, Full, MemoryLedger
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Run

log = logging.getLogger(__name__)

Estimates = Callable[[Run], Sequence[UnitEstimate]]
"""Of all units of the model, for a microbatch of a run. Raises CheckpointError where the work cannot be estimated."""

MeasureRates = Callable[[torch.device, "torch.dtype | None"], Rates]
"""(device, dtype of autocast)"""


class PassEstimator:
    """Of one device, which is lent for a `share` of the time. Used on its thread: rates are measured when first asked for."""

    def __init__(
        self,
        device: torch.device,
        estimates: Estimates,
        measure: MeasureRates,
        ledger: MemoryLedger,
        *,
        share: float = 1.0,
    ) -> None:
        self._device = device
        self._ledger = ledger
        self._estimates = estimates
        self._measure = measure
        self._share = share
        self._rates: dict[torch.dtype | None, Rates] = {}

    def __repr__(self) -> str:
        return f"<PassEstimator of {self._device}, {len(self._rates)} rates measured>"

    def unit_s(self, run: Run, units: Span, *, recompute: bool) -> float:
        """Seconds for one of these units, there and back; 0 where work cannot be estimated, or there is no memory to measure in.
        `recompute`: graphs are not kept."""
        try:
            estimates = self._estimates(run)[slice(*units)]
            rates = self._rates_of(autocast_dtype(self._device, wanted=run.autocast))
        except (CheckpointError, Full) as error:
            log.info("%s; how long it takes is known when it was timed", error)
            return 0.0
        passes_s = sum(one.learning_s(rates) + recompute * rates.seconds(one.forward) for one in estimates)
        return passes_s / units.units / self._share

    def _rates_of(self, dtype: torch.dtype | None) -> Rates:
        if dtype not in self._rates:
            with self._ledger.reserve(Account.ACTIVATIONS, MEASURING_BYTES):
                self._rates[dtype] = self._measure(self._device, dtype)
        return self._rates[dtype]
