"""Fit of a model to machines like this one: the number of machines that hold it, and their speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
