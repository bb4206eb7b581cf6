"""How far honest replicas lie apart, by number format and codec.

Floating-point sums depend on their order, and so on who shares a pass and on whether a position came alone or in a prompt. The
table is of 12,000 honest comparisons of most kinds over a small Llama of 8 layers; FP16 as a codec, and float16 with INT4, are set
after their neighbours. Noise is taken to grow with the square root of the units that it went through.

Another model has other noise: half of a pair's positions lay up to 3.3 times as far apart as the table says, over an untaught Llama
of 4 layers, where the farthest lay at most 2.7 times as far as the median one in all of them. So a comparison is held against its
own median, as far as `Calibration` believes it: who is false at some positions does not move that, who is false at all of them
does not move it by more than honest replicas of the same model have.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.codec.tensors import Codec
from swarmnode.net.interfaces import PeerId

MARGIN = 1.25  # over what was found
BEYOND = 1e-4  # of the positions
TABLE_UNITS = 8
SHALLOW_UNITS = 4
ROUNDING = 1e-7  # of a sketch itself
MAX_FACTOR = 4.0  # by which a model may be found to differ from the table's
SPREAD = 1.5  # between comparisons over one model
ADAPTED = 3.0  # through an adapter, whose products add to the noise: honest texts lay at 1.5 times the tolerance
VOICES = 5  # peers whose noise is known before it counts
MAX_VOICES = 64

CONTRIBUTED = {  # of a row's elements, by how they travel: what rounds differently in sums of thousands, or by the codec, with room
    Codec.NONE: 1e-3,
    Codec.BF16: 0.02,
    Codec.FP16: 0.01,
    Codec.INT8: 0.1,
}
SMALLEST = {Codec.FP16: 2.0**-24}  # that an element can be, but 0


@dataclass(frozen=True)
class Noise:
    """Of honest pairs: the median relative deviation of a position, what one position of 10,000 exceeds, and which share of tokens
    was drawn otherwise."""

    median: float
    high: float
    other_tokens: float


@dataclass(frozen=True)
class Tolerance:
    """Up to which relative deviation a position counts as the same, which share of honest positions may lie `beyond`, and of honest
    tokens be another."""

    deviation: float
    beyond: float
    other_tokens: float


UNKNOWN = Noise(5e-2, 2e-1, 0.2)  # of a format of another version: what is grossly false shows
_BF16 = Noise(4.1e-3, 1.13e-2, 2e-2)
_FP16 = Noise(5.5e-4, 1.4e-3, 5e-3)

NOISE: Mapping[tuple[str, Codec], Noise] = {
    ("float32", Codec.NONE): Noise(1.9e-7, 6.0e-7, 2e-3),
    ("float32", Codec.FP16): Noise(0.0, 3.0e-4, 2e-3),
    ("float32", Codec.BF16): Noise(0.0, 2.0e-3, 5e-3),
    ("float32", Codec.INT8): Noise(0.0, 5.0e-3, 1e-2),
    ("float32", Codec.INT4): Noise(0.0, 6.0e-2, 5e-2),
    ("bfloat16", Codec.NONE): _BF16,
    ("bfloat16", Codec.FP16): _BF16,
    ("bfloat16", Codec.BF16): _BF16,
    ("bfloat16", Codec.INT8): Noise(7.6e-3, 2.2e-2, 3e-2),
    ("bfloat16", Codec.INT4): Noise(5.2e-3, 1.7e-1, 8e-2),
    ("float16", Codec.NONE): _FP16,
    ("float16", Codec.FP16): _FP16,
    ("float16", Codec.BF16): Noise(1.2e-3, 5.5e-3, 5e-3),
    ("float16", Codec.INT8): Noise(2.7e-3, 1.8e-2, 1e-2),
    ("float16", Codec.INT4): Noise(5.2e-3, 1.7e-1, 8e-2),
}


def noise_of(number_format: str, codec: Codec) -> Noise:
    """Of honest pairs. Quantised weights are the same numbers everywhere: only the format of the sums counts."""
    return NOISE.get((number_format.partition("-")[0], codec), UNKNOWN)


@dataclass
class Calibration:
    """By how much the noise of one model differs from the table's. `of`: for each peer the last ratio of medians, so that nobody
    has more than one voice, and the median of all decides."""

    of: OrderedDict[PeerId, float] = field(default_factory=OrderedDict)

    def note(self, peer: PeerId, number_format: str, codec: Codec, deviations: Sequence[float], *, units: int) -> None:
        """Deviations of a peer's segment that was found right, `units` units into the model."""
        ratio = _ratio(number_format, codec, deviations, units)
        if ratio is not None:
            self.of[peer] = ratio
            self.of.move_to_end(peer)
            if len(self.of) > MAX_VOICES:
                self.of.popitem(last=False)

    @property
    def most(self) -> float:
        """The largest factor that is believed."""
        if len(self.of) < VOICES:
            return MAX_FACTOR
        return min(MAX_FACTOR, max(1.0, SPREAD * statistics.median(self.of.values())))

    def tolerance(
        self, number_format: str, codec: Codec, *, units: int, deviations: Sequence[float] = (), adapted: bool = False
    ) -> Tolerance:
        """For what came out after so many units of the model, and of which these `deviations` were found; `adapted`: through an
        adapter."""
        noise = noise_of(number_format, codec)
        factor = min(self.most, max(1.0, _ratio(number_format, codec, deviations, units) or 1.0))
        factor *= ADAPTED if adapted else 1.0
        return Tolerance(max(ROUNDING, MARGIN * noise.high * _depth(units) * factor), BEYOND, noise.other_tokens)


def _ratio(number_format: str, codec: Codec, deviations: Sequence[float], units: int) -> float | None:
    """By how much the median of deviations differs from the table's; None where the table has none, or there are none."""
    expected = noise_of(number_format, codec).median * _depth(units)
    median = statistics.median(deviations) if deviations else math.nan
    return median / expected if expected > ROUNDING and math.isfinite(median) else None


def _depth(units: int) -> float:
    return math.sqrt(max(SHALLOW_UNITS, units) / TABLE_UNITS)
