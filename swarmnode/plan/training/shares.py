"""How much of a group's vector each contributor adds up: as much as its line carries, beside the others'.

Whoever adds up a share s of a vector of n contributors sends its values of all other parts, and its own sums to all others:
1 + (n - 2) s times the vector, and takes as much. So who has a slow line adds up little. Lines are what peers say of themselves:
none counts for more than `MOST_SHARE` nor for less than `LEAST_SHARE`, with `USUAL_SHARE` for the median one and for those that
nobody measured, and nobody adds up more than half.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from swarmnode.codec.averaging_messages import MOST_SHARE, USUAL_SHARE

LEAST_SHARE = 1  # so that each owner sees a part of what all others contribute


def part_shares(lines_bps: Sequence[float]) -> tuple[int, ...]:
    """The share of each contributor, beside the others'; 0 bits/s: not known. Of two, both send the whole vector once, however it
    is shared."""
    known = [line_bps for line_bps in lines_bps if 0 < line_bps < math.inf]
    if len(lines_bps) < 3 or not known:
        return (USUAL_SHARE,) * len(lines_bps)
    usual_bps = statistics.median_low(known)
    shares = [_share(line_bps / usual_bps) for line_bps in lines_bps]
    return tuple(min(share, max(LEAST_SHARE, sum(shares) - share)) for share in shares)


def _share(ratio: float) -> int:
    """Of a line that is so many times the usual one."""
    bounded = min(ratio, MOST_SHARE / USUAL_SHARE)
    return max(LEAST_SHARE, round(USUAL_SHARE * bounded)) if ratio > 0 else USUAL_SHARE
