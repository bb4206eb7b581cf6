"""Which gradient compressor a run asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Size

from swarmnode.compute.training.averaging.acp_sgd import AcpSgdCompressor
from swarmnode.compute.training.averaging.gradient_compressor import GradientCompressor, PlainGradientCompressor
from swarmnode.compute.training.averaging.power_sgd import PowerSgdCompressor
from swarmnode.swarm.records.run import Averaging


def make_gradient_compressor(averaging: Averaging, shapes: Sequence[Size]) -> GradientCompressor:
    """For tensors of these `shapes`; see `Learner.shapes`."""
    if not averaging.rank:
        return PlainGradientCompressor(averaging, shapes)
    return (AcpSgdCompressor if averaging.alternating else PowerSgdCompressor)(averaging, shapes)
