"""Groups of replicas that average at the end of a step, and the encoding of their values.

Every step (`Averaging.every` = 1): the gradients of each layer are summed over its replicas, and all replicas make the same
update.

Every H steps (DiLoCo, arXiv 2311.08105), after a warm-up with gradients summed in every step: in between each replica
updates by itself. At every H-th step, and at the last one, replicas average how far their parameters moved; see
`compute/training/block.py`. The parameters that the first and the last layer share must stay identical, so their gradient is
summed in every step unless all holders of the ends hold the whole model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.codec.body import SHARED
from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo
from swarmnode.codec.training_messages import Form, Group, How, MemberSpec
from swarmnode.net.interfaces import PeerId
from swarmnode.plan.compression import LADDER, encoded_bytes
from swarmnode.plan.training.averaging import part_shares
from swarmnode.plan.view import Span
from swarmnode.swarm.records.run import Averaging, Run

WORTH = 1.25  # times the time of the usual line: a slow line may take this long
FEWEST, MOST = 1 / 8, 4.0  # times the run's share of elements that top-k keeps
SAMPLE = 1 << 16  # elements: the size for the comparison of codecs


@dataclass(frozen=True)
class Holder:
    """A replica that takes part. A replica that `listens` is behind the others and only receives what they agree on.
    `line_bps`: bits/s of its line; 0 if unknown."""

    peer: PeerId
    span: Span
    listens: bool = False
    line_bps: float = 0.0


Count = Callable[[PeerId, Sequence[int]], int]
"""(peer, units) -> the largest number of microbatches that `peer` has counted for one of `units`."""


def make_groups(
    units: int,
    run: Run,
    step: int,
    holders: Sequence[Holder],
    count: Count,
    codecs: Collection[int] = tuple(Codec),
) -> list[Group]:
    """Return the groups that average at the end of `step`. Layers with the same members and the same counts form one group;
    the parameters that both ends share form another one. Groups without members are left out. `codecs`: the codecs that the
    swarm allows."""
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
    """Return what the blocks of layers do at the end of `step`. Replicas that separate at random weights do not converge
    again, so gradients are summed in every step of the warm-up."""
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
    """Return the members of a group with counts, shares and forms. At an averaging, a replica that counted nothing in this
    step still counts as 1: it contributes its progress since the last averaging."""
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
    """Return the form (codec and share of elements) of each contributor's values. `lines_bps`: bits/s, 0 if unmeasured;
    `shares`: how much each adds up, relative to the others; `codecs`: the codecs that the swarm allows. All get the run's
    form if the run does not choose by line or fewer than two lines are known; so do contributors whose line is the usual one
    or unknown.

    If the run's codec takes more than `WORTH` times the usual time on a line, the contributor gets the mildest codec that
    does not, or the strongest there is. With top-k the share of the elements follows from the line, so that all end
    together: BCRS (bandwidth-aware compression ratio scheduling, Tang et al., arXiv 2408.14736), within bounds.
    """
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
    """Return the run's codec and the codecs that slow lines may use instead, mildest first. Sparse codecs have no
    alternative."""
    return (Codec(averaging.codec),) if averaging.codec in SPARSE_CODECS else tuple(_ladder(averaging, codecs))


def _ladder(averaging: Averaging, codecs: Collection[int]) -> list[Codec]:
    """Return the run's codec and the stronger ones allowed. Robust sums compare contributions, and int4 is too noisy for
    that."""
    own = Codec(averaging.codec)
    strongest = Codec.INT8 if averaging.robust else Codec.INT4
    wanted = (codec for codec in LADDER if codec in codecs and _bytes(strongest) <= _bytes(codec) < _bytes(own))
    return [own, *wanted]


def _codec(ladder: Sequence[Codec], slowness: float) -> Codec:
    """Return the mildest codec that keeps a line of this `slowness` within `WORTH` times the usual time; else the strongest."""
    fitting = (codec for codec in ladder if slowness * _bytes(codec) <= WORTH * _bytes(ladder[0]))
    return next(fitting, ladder[-1])


def _kept(keep: float, slowness: float) -> float:
    return min(1.0, keep * min(MOST, max(FEWEST, 1 / slowness)))


def _bytes(codec: Codec) -> int:
    return encoded_bytes([TensorInfo(Codec.NONE, DType.FLOAT32, (SAMPLE,))], codec)
