"""Table of tolerances: how much noise is honest, how many findings of a kind are too many, and for how long they count.

Other files judge by these numbers and have none of their own. `plan/findings.py` has the rule for findings, `plan/audits.py` the
comparison of two computations.

Over trained models the deviations of honest replicas have a heavy tail: at a position that magnifies small differences (one of the
first, a delimiter) kernels lie up to twenty medians apart. Of the positions beyond the tolerance, a fourth lie twice as far off,
and so on: a position lies at least r tolerances off with the probability BEYOND / r ** 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmnode.codec.tensors import Codec

# -- how many findings, and for how long (seconds unless named otherwise)

HALF_LIFE_S = 3 * 86_400.0  # of passed positions, audited positions and near misses
SHUN_S = 7 * 86_400.0
DOUBT_S = 3 * 86_400.0
DOUBTS = 3  # with this many different others
NEAR_MISSES = 3  # texts at least
NEAR_MISS_RATE = 1e-4  # of honest peers, per position: none in 90 texts of two models (docs/decisions/audits.md)
MAX_NEAR_TEXTS = 64
REPEATED = 0.25  # near misses that a text counts for if it comes again
HALF_TRUST = 2_000.0  # audited positions
NEWCOMER_WEIGHT = 0.25
TRIALS = 3  # that must pass before an accusation counts as false: a peer that lies only sometimes is not caught by each

FAILURES = 3  # in a row: a peer of a training that can be spared is left out
ATTEMPTS = 6  # of a stage, with pauses between them that double: 15 s in all
NAN_CLAIMS = 24  # in a step of a training, after which it stops
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0  # after a failure; it doubles with each in a row
FORGOTTEN_S = 300.0  # after a pause: the next one is a first one again
PASS_PAUSE_S = 5.0  # first pause of a peer that failed in a pass through a module
TUNING_PAUSE_S = 1.0  # the same in a tuning
LEAVING_S = 30.0  # a leaving peer does not come back soon
CLAIM_S = 60.0  # how long a claim counts against a hop of a session that makes others
CLAIMS = 4
"""Arguable claims, or repeated ones about the same peers, since the last progress after which nothing can be decided"""
OTHERS_S = 5.0  # after a first failure of an all-reduce, for the answers of the others, which show whose fault it was
PROBATION_S, MAX_PROBATION_S = 2.0, 60.0  # of a lost peer that announces itself again; it doubles, too
FORGIVEN_AFTER_S = 120.0

# -- noise between computations of the same numbers

CHANCE = 1e-7  # probability below which what honest peers would do counts as false
NEAR_CHANCE = 1e-4
UNTRUSTED_CHANCE = 1e-2  # work as rare among honest peers raises no trust; none of 200,000 positions of SmolLM2 was
MARGIN = 1.25  # over the measured noise
BEYOND = 4e-2  # of the positions: between two kernels at most 2.1e-2, and half of those lie twice as far off
FAR = 64.0  # times the tolerance, at a single position: over Gemma 3 in bfloat16 one of 2,048 honest ones lay at 35
FAR_EXACT = 128.0  # of float32 that travels as it is: honest ones lay at 25 at most, lies at 1,600 and more
NEAR = 0.25  # of what is far
TABLE_UNITS = 8
SHALLOW_UNITS = 4
ROUNDING = 1e-7  # of a sketch itself
SAME = 1e-4  # deviation between sketches of the same bytes, made on different machines
MAX_FACTOR = 4.0  # largest factor between a model's noise and the table's
EXACT_ROOM = (
    4.0  # times as much in float32 that travels as it is: trained models lie at up to 4.8, coarser formats at thousands
)
SPREAD = 1.5  # between comparisons over one model
ADAPTED = 3.0  # through an adapter, whose products add to the noise: honest texts lay at 1.5 times the tolerance
PACKED_ROOM = 1.5  # as MAX_FACTOR, for fast products: a smaller format of the weights is only some times farther off
VOICES = 5  # peers whose noise is known before it counts
MAX_VOICES = 64
LOGITS_SPREAD = 3.0  # of logits, relative to their root mean square, in tolerated deviations of states
PASS = 0.03  # relative, of a pass through a module: TF32's products are good to 1e-3
COARSE_PASS = 0.15  # the same for bfloat16 and float16

# -- noise between gradients

SUMS_ROUND = 4.0  # factor: what a microbatch added is the difference of two sums
LOSS = 0.02  # relative
CONTRIBUTED = {  # of a row's elements, by how they travel: what rounds differently in sums of thousands, or by the codec, with room
    Codec.NONE: 1e-3,
    Codec.BF16: 0.02,
    Codec.FP16: 0.01,
    Codec.INT8: 0.1,
}
SMALLEST = {Codec.FP16: 2.0**-24}  # that an element can be, but 0
LARGEST_RATIO = 1e4  # of the squares that one peer alone reports to those of all others: a hundred times their norm
OUTLYING = 3.0  # times the distance of honest members of an all-reduce, on average
CONSTANT = 5.0  # times the constancy of independent ways
OTHERS = 2.0  # times the other members' constancy: a misleading member moves the centre, and then all are off a little
STEPS = 8  # before constancy counts
AGAINST = 10.0  # a cumulative sum (Page, Biometrika 1954) of how many spreads agreement is below 0 ...
ALLOWANCE = 0.5  # ... less this in each step: mere noise does not add up
LARGEST_STEP = 3.0  # one step alone proves nothing


@dataclass(frozen=True)
class Noise:
    """Noise between honest replicas: the median relative deviation of a position (`median`), the deviation that one position of
    10,000 exceeds (`high`) and the share of tokens that are drawn differently (`other_tokens`)."""

    median: float
    high: float
    other_tokens: float


UNKNOWN = Noise(5e-2, 2e-1, 0.2)  # of a format of another version: grossly false work still shows

_PLAIN = (Codec.NONE, Codec.FP16, Codec.BF16)
NOISE: Mapping[tuple[str, Codec], Noise] = {
    ("float32", Codec.NONE): Noise(1.9e-7, 6.0e-7, 2e-3),
    ("float32", Codec.FP16): Noise(0.0, 3.0e-4, 2e-3),
    ("float32", Codec.BF16): Noise(0.0, 2.0e-3, 5e-3),
    ("float32", Codec.INT8): Noise(0.0, 5.0e-3, 1e-2),
    ("float32", Codec.INT4): Noise(0.0, 6.0e-2, 5e-2),
    **{("bfloat16", codec): Noise(4.1e-3, 1.13e-2, 6e-2) for codec in _PLAIN},
    ("bfloat16", Codec.INT8): Noise(7.6e-3, 2.2e-2, 6e-2),
    ("bfloat16", Codec.INT4): Noise(5.2e-3, 1.7e-1, 8e-2),
    **{("float16", codec): Noise(5.5e-4, 1.4e-3, 5e-3) for codec in (Codec.NONE, Codec.FP16)},
    ("float16", Codec.BF16): Noise(1.2e-3, 5.5e-3, 5e-3),
    ("float16", Codec.INT8): Noise(2.7e-3, 1.8e-2, 1e-2),
    ("float16", Codec.INT4): Noise(5.2e-3, 1.7e-1, 8e-2),
    # Fast products of packed weights between kinds of CPUs; on one kind there is none.
    **{("packed", codec): Noise(1.2e-2, 3.0e-2, 0.16) for codec in _PLAIN},
    ("packed", Codec.INT8): Noise(1.7e-2, 3.8e-2, 0.16),
    ("packed", Codec.INT4): Noise(4.4e-2, 1.0e-1, 0.16),
    **{("packed+kv8", codec): Noise(1.5e-2, 3.4e-2, 0.16) for codec in _PLAIN},
    ("packed+kv8", Codec.INT8): Noise(2.0e-2, 4.3e-2, 0.16),
    ("packed+kv8", Codec.INT4): Noise(4.8e-2, 1.1e-1, 0.16),
}
