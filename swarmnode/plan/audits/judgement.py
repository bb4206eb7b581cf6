"""Judgement: the comparison of a hop's work with a replica's, by the noise of honest replicas.

Honest replicas differ beyond the tolerance now and then, and draw another token. So it is counted how often, and the work is false
where honest replicas would differ so often and so far once in ten million times; or where one position lies farther off than any
honest one. What comes near that is a near miss, which is counted over a peer's texts.

Over trained models the deviations of honest replicas have a heavy tail: at a position that makes much of little (one of the first,
a delimiter) kernels lie up to twenty medians apart. Of positions beyond the tolerance a fourth lie twice as far off, and so on:
k positions that lie at least r tolerances off are as many as chance has it by BEYOND / r ** 2.
"""

from __future__ import annotations

import math
import statistics
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnode.codec.tensors import Codec
from swarmnode.net.interfaces import PeerId

CHANCE = 1e-7
MARGIN = 1.25  # over what was found
BEYOND = 4e-2  # of the positions: between two kernels at most 2.1e-2, of which the half lie twice as far off
FAR = 64.0  # times the tolerance, at a single position: over Gemma 3 in bfloat16 one of 2,048 honest ones lay at 35
FAR_EXACT = 128.0  # of float32 that travels as it is: honest ones lay at 21 at most, lies at 1,600 and more
NEAR = 0.25  # of what is far
NEAR_CHANCE = 1e-4
TABLE_UNITS = 8
SHALLOW_UNITS = 4
ROUNDING = 1e-7  # of a sketch itself
MAX_FACTOR = 4.0  # by which a model may be found to differ from the table's
EXACT_ROOM = (
    4.0  # times as much in float32 that travels as it is: trained models lie at up to 4.8, coarser formats at thousands
)
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
    """Up to which relative deviation a position counts as the same, which share of honest positions may lie `beyond` (of those that
    lie several times as far off: by the square fewer), and of honest tokens be another; how many times the deviation is `far`."""

    deviation: float
    beyond: float
    other_tokens: float
    far: float = FAR


UNKNOWN = Noise(5e-2, 2e-1, 0.2)  # of a format of another version: what is grossly false shows
_BF16 = Noise(4.1e-3, 1.13e-2, 6e-2)
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
    ("bfloat16", Codec.INT8): Noise(7.6e-3, 2.2e-2, 6e-2),
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
        most, far = self.most, FAR
        if (number_format, codec) == ("float32", Codec.NONE):
            most, far = EXACT_ROOM * most, FAR_EXACT
        factor = min(most, max(1.0, _ratio(number_format, codec, deviations, units) or 1.0))
        factor *= ADAPTED if adapted else 1.0
        return Tolerance(max(ROUNDING, MARGIN * noise.high * _depth(units) * factor), BEYOND, noise.other_tokens, far)


def _ratio(number_format: str, codec: Codec, deviations: Sequence[float], units: int) -> float | None:
    """By how much the median of deviations differs from the table's; None where the table has none, or there are none."""
    expected = noise_of(number_format, codec).median * _depth(units)
    median = statistics.median(deviations) if deviations else math.nan
    return median / expected if expected > ROUNDING and math.isfinite(median) else None


def _depth(units: int) -> float:
    return math.sqrt(max(SHALLOW_UNITS, units) / TABLE_UNITS)


@dataclass(frozen=True)
class Judgement:
    """Of the first `compared` positions `beyond` were not the same; `worst` is the largest deviation over what is tolerated.
    `near`: not false, and nearer to that than most honest work is."""

    compared: int
    beyond: int
    worst: float
    false: bool
    near: bool = False


def judge_states(deviations: Sequence[float], tolerance: Tolerance) -> Judgement:
    """Of what a hop sent on at a segment's positions: relative deviations from what a replica sent on."""
    ratios = [math.inf if math.isnan(deviation) else deviation / tolerance.deviation for deviation in deviations]
    worst = max(ratios, default=0.0)
    beyond = sorted((ratio for ratio in ratios if ratio > 1.0), reverse=True)
    false = worst > tolerance.far or _are_too_many(beyond, len(ratios), tolerance.beyond, CHANCE)
    near = worst > NEAR * tolerance.far or _are_too_many(beyond, len(ratios), tolerance.beyond, NEAR_CHANCE)
    return Judgement(len(ratios), len(beyond), worst, false, near=near and not false)


def judge_tokens(drawn: Sequence[int], again: Sequence[int], tolerance: Tolerance) -> Judgement:
    """Of the tokens that the last hop drew, and those that a replica drew at the same positions after the same text."""
    compared = min(len(drawn), len(again))
    other = sum(one != two for one, two in zip(drawn, again, strict=False))
    false = _chance_of_at_least(other, compared, tolerance.other_tokens) < CHANCE
    return Judgement(compared, other, other / max(1.0, tolerance.other_tokens * compared), false)


def _are_too_many(beyond: Sequence[float], compared: int, rate: float, chance: float) -> bool:
    """Return whether positions that lie so many tolerances off (`beyond`, the farthest first) are more than honest ones would be
    with this chance. Each number of them is tried: whether as many lie at least as far off as the last of these."""
    return any(
        compared * _chance_of_at_least(count, compared, rate / ratio**2) < chance
        for count, ratio in enumerate(beyond, start=1)
    )


def _chance_of_at_least(beyond: int, compared: int, rate: float) -> float:
    """That so many of so many happen which each have this chance (the binomial's upper tail)."""
    if beyond == 0:
        return 1.0
    counts = range(beyond, compared + 1)
    return math.fsum(math.comb(compared, count) * rate**count * (1 - rate) ** (compared - count) for count in counts)
