"""Which replicas agree on what at the end of a step, and what their values travel as.

Every step (`Averaging.every` = 1): the gradients of each unit are summed over its replicas, and all update alike.

Every H steps (DiLoCo, arXiv 2311.08105), after a warm-up in which every step's gradients are summed: in between each replica
updates by itself. At every H-th step, and at the last one, replicas average how far their parameters came; see
`compute/training/block.py`. What the first and the last unit share has to stay one thing, so its gradient is summed in every step
unless all who hold it hold the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.codec.averaging_messages import Form, Group, How, MemberSpec
from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.plan.training.averaging import part_shares
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Averaging, Run

WORTH = 1.25  # times as long as the usual line takes may be waited for a slow one
FEWEST, MOST = 1 / 8, 4.0  # times the run's share of elements that top-k keeps
SAMPLE = 1 << 16  # elements by which codecs are compared


@dataclass(frozen=True)
class Holder:
    """Somebody who takes part. `listens`: behind the others, it only hears what they agree on. `line_bps`: what its line carries;
    0: not known."""

    peer: PeerId
    span: Span
    listens: bool = False
    line_bps: float = 0.0


Count = Callable[[PeerId, Sequence[int]], int]
"""(peer, units) -> how many microbatches it has counted for one of them, at most"""


def make_groups(
    units: int,
    run: Run,
    step: int,
    holders: Sequence[Holder],
    count: Count,
    codecs: Collection[int] = tuple(Codec),
) -> list[Group]:
    """Units that the same members hold, with the same counts, are one group; what the ends share is one of its own. `codecs`: those
    that the swarm allows."""
    how = _how(run, step)
    ordered = sorted(holders, key=lambda holder: holder.peer)
    by_members: dict[tuple[MemberSpec, ...], list[int]] = {}
    for unit in range(units):
        held_here = [holder for holder in ordered if holder.span.start <= unit < holder.span.end]
        members = _members(held_here, (unit,), how, count, run.averaging, codecs)
        by_members.setdefault(members, []).append(unit)
    ends = [holder for holder in ordered if holder.span.start == 0 or holder.span.end == units]
    shared_how = how if all(holder.span == Span(0, units) for holder in ends) else How.SUM
    groups = [(tuple(held), members, how) for members, held in by_members.items()]
    groups.append(((SHARED,), _members(ends, (0, units - 1), shared_how, count, run.averaging, codecs), shared_how))
    return [Group(number, *group) for number, group in enumerate(groups) if group[1]]


def _how(run: Run, step: int) -> How:
    """What blocks do at the end of a step that need not stay one thing. Replicas that part at random weights never meet again: so
    not in the warm-up."""
    every = run.averaging.every
    if every == 1 or step < run.warmup_steps:
        return How.SUM
    return How.AVERAGE if (step + 1) % every == 0 or step + 1 == run.steps else How.APART


def _members(
    holders: Sequence[Holder],
    units: Sequence[int],
    how: How,
    count: Count,
    averaging: Averaging,
    codecs: Collection[int],
) -> tuple[MemberSpec, ...]:
    """A replica that counted nothing in this one step still says how far it came since the last averaging."""
    least = 1 if how is How.AVERAGE else 0
    taking = [holder for holder in holders if not (holder.listens and how is How.APART)]
    counts = [0 if holder.listens else max(least, count(holder.peer, units)) for holder in taking]
    lines = [holder.line_bps for holder, counted in zip(taking, counts, strict=True) if counted]
    shares = part_shares(lines)
    forms = line_forms(lines, shares, averaging, codecs) if averaging.by_line else [Form()] * len(lines)
    contributions = zip(shares, forms, strict=True)
    return tuple(_member(holder.peer, counted, contributions) for holder, counted in zip(taking, counts, strict=True))


def _member(peer: PeerId, count: int, contributions: Iterator[tuple[int, Form]]) -> MemberSpec:
    if not count:
        return MemberSpec(peer, 0)
    share, form = next(contributions)
    return MemberSpec(peer, count, share, form=form)


def line_forms(
    lines_bps: Sequence[float], shares: Sequence[int], averaging: Averaging, codecs: Collection[int]
) -> tuple[Form, ...]:
    """What each contributor's values travel as. `lines_bps`: 0 where nobody measured one; `shares`: how much each adds up beside
    the others; `codecs`: those that the swarm allows. Who has the usual line, and whose is not known, sends as the run says.

    Nobody is waited for longer than it is worth: where the run's codec takes longer on a line than on most of the others, this
    one gets the mildest codec that does not, or the strongest there is. By top-k the share of the elements follows from the line,
    so that all end together: BCRS (bandwidth-aware compression ratio scheduling, Tang et al., arXiv 2408.14736), within bounds."""
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
