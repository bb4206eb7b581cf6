"""What a model asks of machines like this one: how many of them hold it, and how fast they decode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFit:
    """`machines` such machines hold the model; a token, or a pass through a graph, takes them `pass_s` in turn, in seconds, links
    included."""

    units: int  # of the model
    fitting: int  # of them on one machine, wherever they lie
    machines: int
    pass_s: float

    @property
    def passes_per_s(self) -> float:
        """One after another, as the tokens of a conversation are."""
        return 1 / self.pass_s if self.pass_s else 0.0


def fit(
    weight_bytes: Sequence[float], fitting: int, *, read_bytes_per_s: float, rtt_s: float, led: bool = False
) -> ModelFit | None:
    """A swarm of equal machines, each with `fitting` units; None where not even one unit fits.

    To decode one position every weight is read once, which is what takes the time; each link between two machines takes half a
    round trip, and so does the way back from the last to the first. Where who asks has `led` the pass, as through a graph, each
    machine takes a whole one.
    """
    units = len(weight_bytes)
    if fitting < 1:
        return None
    machines = -(-units // fitting)
    read_s = sum(weight_bytes) / read_bytes_per_s
    links_s = machines * rtt_s if led else machines * rtt_s / 2 if machines > 1 else 0.0
    return ModelFit(units, fitting, machines, read_s + links_s)
