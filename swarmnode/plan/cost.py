"""Cost of computing and sending: the one cost model of placement, routing, planning and simulation.

Times in seconds, sizes in bytes, bandwidths in bits/s; a bandwidth or speed of 0 is unmeasured.

Fit of a model to machines like this one: the number of machines that hold it, and their speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from swarmnode.plan.spans.flow import Floats

BYTES_PER_HIDDEN = 2  # of a position between stages: bfloat16 or float16; float32 nodes send twice that
HOLDERS = 2  # that a unit should have, so that losing one loses nothing that was learnt
FRAGILE = 3.0  # more of a step, relative, are further holders of all units worth

Share = TypeVar("Share", float, Floats)


def fragility(missing: Share) -> Share:
    """Return the acceptable slowdown of a step with all further holders of layers, if the share `missing` is missing now."""
    return 1 + FRAGILE * missing


def transfer_s(size_bytes: float | Floats, delay_s: Floats, bandwidth_bps: Floats) -> Floats:
    """Return the seconds of one message over each idle link: the delay plus the transfer. All arrays have one shape.

    A bandwidth of 0 adds no transfer time."""
    sending_s = np.divide(8 * size_bytes, bandwidth_bps, out=np.zeros(bandwidth_bps.shape), where=bandwidth_bps > 0)
    return delay_s + sending_s


def sustained_units_per_s(
    units_per_s: float, span_units: int, position_bytes: float, up_bps: float = 0.0, down_bps: float = 0.0
) -> float:
    """Return the layers/s that a peer sustains while each position crosses its span and goes out again.

    Computing and sending overlap, so the slower of both decides: a fast card behind a slow line is a slow peer.
    """
    if position_bytes <= 0:
        return units_per_s
    positions_per_s = (
        bandwidth_bps / (8 * position_bytes) for bandwidth_bps in (up_bps, down_bps) if bandwidth_bps > 0
    )
    return min([units_per_s, *(span_units * rate for rate in positions_per_s)])


def step_s(
    compute_s: Sequence[float], hop_s: Sequence[float], *, beat_s: float, microbatches: float, averaging_s: float
) -> float:
    """Estimate a training step in seconds: one microbatch through the pipeline and back, a beat for each other one, averaging.

    `compute_s` per stage (forward and backward), `hop_s` per hop one way; `beat_s` is what the slowest stage or hop needs for
    one microbatch of every pipeline (FusionLLM, arXiv 2410.12707, section 4). The first term is the pipeline's bubble.
    """
    return sum(compute_s) + 2 * sum(hop_s) + max(0.0, microbatches - 1) * beat_s + averaging_s


@dataclass(frozen=True)
class ModelFit:
    """Number of equal machines that hold a model, and the seconds of one token, or of one pass through a graph, through them."""

    units: int  # layers of the model
    fitting: int  # layers that fit on one machine
    machines: int
    pass_s: float  # through all machines, one after another, links included

    @property
    def passes_per_s(self) -> float:
        """Passes per second, one after another like the tokens of a conversation; 0 if `pass_s` is 0."""
        return 1 / self.pass_s if self.pass_s else 0.0


def fit(
    weight_bytes: Sequence[float], fitting: int, *, read_bytes_per_s: float, rtt_s: float, led: bool = False
) -> ModelFit | None:
    """Return the fit of a model to equal machines that each hold `fitting` layers; None if not even one layer fits.

    `weight_bytes` are the bytes of each layer. To decode one position, every weight is read once, at `read_bytes_per_s`. Each
    link between two machines takes half a round trip of `rtt_s` seconds, and so does the way back from the last to the first.
    If the client has `led` the pass from machine to machine, as through a graph, each machine takes a whole round trip.
    """
    units = len(weight_bytes)
    if fitting < 1:
        return None
    machines = -(-units // fitting)
    read_s = sum(weight_bytes) / read_bytes_per_s
    links_s = machines * rtt_s if led else machines * rtt_s / 2 if machines > 1 else 0.0
    return ModelFit(units, fitting, machines, read_s + links_s)
