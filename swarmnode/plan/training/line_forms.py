"""Line forms: what each contributor's values travel as, where who has a slow line is to send less than the others.

Nobody is waited for longer than it is worth: where the run's codec takes longer on a line than on most of the others, this one gets
the mildest codec that does not, or the strongest there is. By top-k the share of the elements follows from the line, so that all
end together: BCRS (bandwidth-aware compression ratio scheduling, Tang et al., arXiv 2408.14736), within bounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence

from swarmnode.codec.averaging_messages import Form
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.swarm.records.run import Averaging

WORTH = 1.25  # times as long as the usual line takes may be waited for a slow one
FEWEST, MOST = 1 / 8, 4.0  # times the run's share of elements that top-k keeps
SAMPLE = 1 << 16  # elements by which codecs are compared


def line_forms(
    lines_bps: Sequence[float], shares: Sequence[int], averaging: Averaging, codecs: Collection[int]
) -> tuple[Form, ...]:
    """Of each contributor. `lines_bps`: 0 where nobody measured one; `shares`: how much each adds up beside the others; `codecs`:
    those that the swarm allows. Who has the usual line, and whose is not known, sends as the run says."""
    usual = Form(averaging.codec, averaging.keep)
    known = [math.isfinite(line_bps) and line_bps > 0 for line_bps in lines_bps]
    loads = [1 + (len(shares) - 2) * share / sum(shares) for share in shares]
    times = [load / bps if is_known else 0.0 for load, bps, is_known in zip(loads, lines_bps, known, strict=True)]
    if not averaging.by_line or sum(known) < 2:
        return (usual,) * len(shares)
    usual_time = statistics.median_low(time for time, is_known in zip(times, known, strict=True) if is_known)
    slowness = [time / usual_time if is_known else 1.0 for time, is_known in zip(times, known, strict=True)]
    if averaging.codec in SPARSE_CODECS:
        return tuple(Form(averaging.codec, _kept(averaging.keep, slow)) for slow in slowness)
    ladder = _ladder(averaging, codecs)
    return tuple(Form(_codec(ladder, slow), averaging.keep) for slow in slowness)


def codecs_by_line(averaging: Averaging, codecs: Collection[int]) -> tuple[Codec, ...]:
    """The run's codec, and those that slow lines may take instead, the mildest first."""
    return (Codec(averaging.codec),) if averaging.codec in SPARSE_CODECS else tuple(_ladder(averaging, codecs))


def _ladder(averaging: Averaging, codecs: Collection[int]) -> list[Codec]:
    """Robust sums compare contributions: int4's noise is too much for that."""
    own = Codec(averaging.codec)
    strongest = Codec.INT8 if averaging.robust else Codec.INT4
    wanted = (codec for codec in LADDER if codec in codecs and _bytes(strongest) <= _bytes(codec) < _bytes(own))
    return [own, *wanted]


def _codec(ladder: Sequence[Codec], slowness: float) -> Codec:
    """The mildest as which values take little longer than the usual ones do on the usual line."""
    fitting = (codec for codec in ladder if slowness * _bytes(codec) <= WORTH * _bytes(ladder[0]))
    return next(fitting, ladder[-1])


def _kept(keep: float, slowness: float) -> float:
    return min(1.0, keep * min(MOST, max(FEWEST, 1 / slowness)))


def _bytes(codec: Codec) -> int:
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (SAMPLE,))], codec)
