"""Selection of audits: the share of sessions, the replicas that compute once more, and the budget. Newcomers are audited more,
peers of long standing less.

An audit computes a session's text once more, as a prompt is, which costs a few of its steps; and it is paid from what the work
itself has cost, so that audits never take more than their share of a swarm's throughput.

Judgement: the comparison of a hop's work with a replica's, by the noise of honest replicas.

Honest replicas differ beyond the tolerance now and then, and draw another token. So differences are counted. The work is false
if honest replicas would differ that often and that far only once in ten million times. It is also false if one position lies
farther off than any honest position. Work close to these limits is a near miss; near misses are counted over a peer's texts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from swarmnode import tolerances
from swarmnode.codec.body import HopSpec
from swarmnode.codec.tensors import Codec
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.swarm.records.announcement import Announcement, State
from swarmnode.tolerances import Noise

PACKED = "packed"  # number format of fast products of packed weights, which round activations to 8 bits
KV8 = "kv8"  # in a number format after "+": KV caches in 8 bits


@dataclass(frozen=True)
class Tolerance:
    """Limits for honest work. Positions within the relative `deviation` count as the same; a share `beyond` of honest positions may
    exceed it, and a share `other_tokens` of honest tokens may differ. A position more than `far` times `deviation` off is false.
    `capped`: the comparison's own median would have widened it beyond what honest noise explains."""

    deviation: float
    beyond: float
    other_tokens: float
    far: float = tolerances.FAR
    capped: bool = False


def noise_of(number_format: str, codec: Codec) -> Noise:
    """Return the noise between honest replicas for `number_format` and `codec`; `UNKNOWN` if the table has no entry.

    Quantised weights are the same numbers everywhere, so only the part of the format before the first "-" counts. With KV caches
    in 8 bits all dtypes have the noise of bfloat16: a key that tips over to the next step is off by as much. Fast products have
    more noise of their own, and rows for these caches."""
    numbers = number_format.partition("-")[0]
    dtype, _, kept = numbers.partition("+")
    is_rounded = kept == KV8 and dtype != PACKED and (dtype, codec) in tolerances.NOISE
    known = "bfloat16" if is_rounded else numbers
    return tolerances.NOISE.get((known, codec), tolerances.UNKNOWN)


@dataclass
class Calibration:
    """Measured ratio of one model's noise to the table's. `of` maps each peer to its last ratio of medians, so that each peer has
    one voice; the median over peers decides."""

    of: Recent[PeerId, float] = field(default_factory=lambda: Recent(tolerances.MAX_VOICES))

    def record(
        self, peer: PeerId, number_format: str, codec: Codec, deviations: Sequence[float], *, units: int
    ) -> None:
        """Record the `deviations` of a segment of `peer` that was judged right, `units` layers into the model.

        Fast products say nothing of a model's noise: on machines of one kind they have none. Nor do unknown formats."""
        is_silent = _is_packed(number_format) or noise_of(number_format, codec) is tolerances.UNKNOWN
        ratio = None if is_silent else _ratio(number_format, codec, deviations, units)
        if ratio is not None:
            self.of[peer] = ratio

    @property
    def most(self) -> float:
        """Upper limit of the model's noise factor; `MAX_FACTOR` until the ratios of `VOICES` peers are known."""
        if len(self.of) < tolerances.VOICES:
            return tolerances.MAX_FACTOR
        return min(tolerances.MAX_FACTOR, max(1.0, tolerances.SPREAD * statistics.median(self.of.values())))

    def tolerance(
        self, number_format: str, codec: Codec, *, units: int, deviations: Sequence[float] = (), adapted: bool = False
    ) -> Tolerance:
        """Return the tolerance for the output after `units` layers of the model. It widens with the measured `deviations`, up to a
        limit, and if the output is `adapted` (computed through an adapter)."""
        noise = noise_of(number_format, codec)
        most, far = self.most, tolerances.FAR
        if (number_format, codec) == ("float32", Codec.NONE):
            most, far = tolerances.EXACT_ROOM * most, tolerances.FAR_EXACT
        elif _is_packed(number_format):
            most = tolerances.PACKED_ROOM
        ratio, room = _ratio(number_format, codec, deviations, units) or 1.0, tolerances.ADAPTED if adapted else 1.0
        factor = room * min(most, max(1.0, ratio))
        deviation = max(tolerances.ROUNDING, tolerances.MARGIN * noise.high * _depth(units) * factor)
        return Tolerance(deviation, tolerances.BEYOND, noise.other_tokens, far, capped=ratio > room * most)


def _is_packed(number_format: str) -> bool:
    return number_format.partition("-")[0].partition("+")[0] == PACKED


def _ratio(number_format: str, codec: Codec, deviations: Sequence[float], units: int) -> float | None:
    """Return the median of `deviations` over the table's; None if the table's is below rounding or there is no finite median."""
    expected = noise_of(number_format, codec).median * _depth(units)
    median = statistics.median(deviations) if deviations else math.nan
    return median / expected if expected > tolerances.ROUNDING and math.isfinite(median) else None


def _depth(units: int) -> float:
    return math.sqrt(max(tolerances.SHALLOW_UNITS, units) / tolerances.TABLE_UNITS)


@dataclass(frozen=True)
class Judgement:
    """Result of a comparison. Of `compared` positions or tokens `beyond` were not the same. `worst` is the largest deviation over
    the tolerated deviation; for tokens, the number that differ over the tolerated number. `near`: not false, but suspicious.
    `proves`: the work is as near as honest work is, so that it may raise trust. `at`: the position that lies farthest off."""

    compared: int
    beyond: int
    worst: float
    false: bool
    near: bool = False
    proves: bool = True
    at: int = 0


def judge_states(deviations: Sequence[float], tolerance: Tolerance) -> Judgement:
    """Judge a hop's output by its relative `deviations` from a replica's output, one per position. NaN counts as infinite."""
    ratios = [math.inf if math.isnan(deviation) else deviation / tolerance.deviation for deviation in deviations]
    worst = max(ratios, default=0.0)
    beyond = sorted((ratio for ratio in ratios if ratio > 1.0), reverse=True)
    false = worst > tolerance.far or _are_too_many(beyond, len(ratios), tolerance.beyond, tolerances.CHANCE)
    is_unlikely = _are_too_many(beyond, len(ratios), tolerance.beyond, tolerances.NEAR_CHANCE)
    near = worst > tolerances.NEAR * tolerance.far or is_unlikely
    is_rare = _are_too_many(beyond, len(ratios), tolerance.beyond, tolerances.UNTRUSTED_CHANCE)
    proves = not (false or near or is_rare or tolerance.capped)
    at = ratios.index(worst) if ratios else 0
    return Judgement(len(ratios), len(beyond), worst, false, near=near and not false, proves=proves, at=at)


def judge_tokens(drawn: Sequence[int], again: Sequence[int], tolerance: Tolerance) -> Judgement:
    """Judge the tokens that the last hop has `drawn` by the tokens that a replica drew `again` at the same positions."""
    compared = min(len(drawn), len(again))
    other = sum(one != two for one, two in zip(drawn, again, strict=False))
    false = _chance_of_at_least(other, compared, tolerance.other_tokens) < tolerances.CHANCE
    return Judgement(compared, other, other / max(1.0, tolerance.other_tokens * compared), false, proves=not false)


def judge_draws(other: int, compared: int, honest: Sequence[bool], tolerance: Tolerance) -> Judgement:
    """Judge a last hop whose tokens differ at `other` of `compared` positions, after a look at the likelihoods at some of these
    positions. `honest` says for each of them whether rounding explains the token; other positions are taken to be like them."""
    wrong = round(other * honest.count(False) / max(1, len(honest)))
    false = _chance_of_at_least(wrong, compared, tolerance.other_tokens) < tolerances.CHANCE
    return Judgement(compared, wrong, wrong / max(1.0, tolerance.other_tokens * compared), false, proves=False)


def _are_too_many(beyond: Sequence[float], compared: int, rate: float, chance: float) -> bool:
    """Return whether honest work would have positions as far off as `beyond` with less than `chance`. `beyond` holds the
    deviations in tolerances, the largest first; each prefix of it is tested."""
    return any(
        compared * _chance_of_at_least(count, compared, rate / ratio**2) < chance
        for count, ratio in enumerate(beyond, start=1)
    )


def _chance_of_at_least(beyond: int, compared: int, rate: float) -> float:
    """Return the probability of at least `beyond` successes in `compared` trials at `rate` (the binomial's upper tail)."""
    if beyond == 0:
        return 1.0
    counts = range(beyond, compared + 1)
    return math.fsum(math.comb(compared, count) * rate**count * (1 - rate) ** (compared - count) for count in counts)


SHARE = 0.03  # of the throughput
SAME_CLASS = 0.75  # of audits by peers of one class, if they can be; the others by any, since a class may be made up
NEWCOMER = 2.0  # times the mean share
LONG_STANDING = 0.5


def second_route(
    route: Sequence[HopSpec],
    peers: Mapping[PeerId, Announcement],
    random: Random,
    *,
    avoid: Collection[PeerId] = (),
    same_bits: bool = False,
    kinds: Sequence[tuple[str, bytes] | None] = (),
) -> tuple[HopSpec, ...] | None:
    """Return `route` with each hop moved to a random other peer that can replace it; None if no hop has a replica.

    A replica is ready, holds the hop's layers and announces the hop's number format. The choice is random so that no peer can
    arrange its auditor. A hop without a replica keeps its peer. Peers in `avoid` are never chosen as replicas. With `same_bits`
    replicas also are of the hop's class of equal bits; None if a hop has no class. `kinds` gives each hop's number format and class
    in place of what its peer announces; then a hop without a class only keeps its peer.
    """
    if not kinds:
        known = [peers.get(hop.peer) for hop in route]
        kinds = [(peer.number_format, peer.bits) if peer is not None else None for peer in known]
        if same_bits and not all(kind is not None and kind[1] for kind in kinds):
            return None
    used: set[PeerId] = {hop.peer for hop in route}
    second: list[HopSpec] = []
    for hop, kind in zip(route, kinds, strict=True):
        able = [
            peer.peer
            for peer in peers.values()
            if kind is not None
            and peer.peer not in {*used, *avoid}
            and peer.life is State.READY
            and peer.span[0] <= hop.start
            and hop.end <= peer.span[1]
            and peer.number_format == kind[0]
            and (not same_bits or peer.bits == kind[1] != b"")
        ]
        chosen = random.choice(sorted(able)) if able else hop.peer
        used.add(chosen)
        second.append(HopSpec(chosen, hop.start, hop.end))
    return tuple(second) if any(new.peer != old.peer for new, old in zip(second, route, strict=True)) else None


def audit_route(
    route: Sequence[HopSpec],
    peers: Mapping[PeerId, Announcement],
    random: Random,
    *,
    avoid: Collection[PeerId] = (),
    moved: bool = False,
) -> tuple[tuple[HopSpec, ...] | None, bool]:
    """Return the route for computing a text again, as `second_route`, and whether digests decide.

    They do in most audits if two more peers of the same class of equal bits hold each hop that has a replica, the second of them
    for a third run.

    A session that has `moved` may hold positions of another class.
    """
    any_class = second_route(route, peers, random, avoid=avoid)
    if any_class is None or moved or random.random() >= SAME_CLASS:
        return any_class, False
    again = second_route(route, peers, random, avoid=avoid, same_bits=True) or route
    third = second_route(route, peers, random, avoid={*avoid, *(hop.peer for hop in again)}, same_bits=True) or route
    places = zip(route, any_class, again, third, strict=True)
    exact = all(other == old or (new != old and last != old) for old, other, new, last in places)
    return (tuple(again), True) if exact else (any_class, False)


@dataclass(frozen=True)
class SessionCost:
    """Cost of serving a session and of auditing it, in seconds of one layer."""

    served_s: float
    audit_s: float


def cost_of(prompt: int, drawn: int, *, decode_s: float, prefill_s: float) -> SessionCost:
    """Return the cost of a session with `prompt` prompt tokens and `drawn` new tokens, at `prefill_s` seconds for a position of a
    prompt and `decode_s` seconds for a step."""
    return SessionCost(prompt * prefill_s + drawn * decode_s, (prompt + drawn) * prefill_s)


def factor(trust: float) -> float:
    """Return the multiple of the mean audit share for a peer of this `trust` (0: newcomer, 1: long standing)."""
    return NEWCOMER + (LONG_STANDING - NEWCOMER) * min(1.0, max(0.0, trust))


class AuditBudget:
    """Budget of audits: `share` of the cost of served sessions, with at most about `burst` audits ahead of it."""

    def __init__(self, share: float = SHARE, *, burst: float = 4.0) -> None:
        self.share = share
        self._burst = burst
        self._spent_s = 0.0
        self._earned_s = 0.0

    def chance(self, cost: SessionCost, trust: float) -> float:
        """Count the session as served and return the probability of an audit for it; 0 if the budget is spent. `trust` is the
        trust of its least trusted hop."""
        self._earned_s += self.share * cost.served_s
        if self.share == 0 or self._spent_s > self._earned_s + self._burst * cost.audit_s:
            return 0.0
        return min(1.0, factor(trust) * self.share * cost.served_s / cost.audit_s)

    def afford(self, cost: SessionCost) -> bool:
        """Spend an audit that another peer asks for and return True; return False and spend nothing if the budget is spent."""
        able = self.share > 0 and self._spent_s <= self._earned_s + self._burst * cost.audit_s
        if able:
            self.spend(cost)
        return able

    def spend(self, cost: SessionCost) -> None:
        """Charge one audit of a session of this `cost` to the budget."""
        self._spent_s += cost.audit_s
