"""Compression of the data on a link: just enough to take the link off the critical path.

A pipeline's beat is what one microbatch costs its slowest stage in computing. With several microbatches in flight a link's delay is
hidden, its throughput is not: a link keeps up where the bytes of a microbatch take less than a beat. So the mildest rung of
the ladder is chosen that does. Each direction of each link chooses by itself, from what its receiver measured.

A session chooses by the same rule, once for the prompt of a text and once for its steps, and keeps its choices by position, so that
a second sender sends the same bytes. A prompt is many positions at once, so the link must keep up with the pass that computes
them. A step is one position that waits for its transfer; a transfer that is short beside the pass and the round trip is not worth
a loss of precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarmnode.codec.tensors import FLOAT_DTYPES, Codec, DType, TensorInfo, payload_bytes
from swarmnode.swarm.records.run import AUTO, Compression

LADDER = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)
COARSENESS = (Codec.NONE, Codec.FP16, Codec.BF16, Codec.INT8, Codec.INT4, Codec.INT2, Codec.TOPK, Codec.TOPK2)
HURRY = 2  # looks in a row that ask for more compression before it is taken up
PATIENCE = 16  # looks in a row that would allow less
TOPK, ADATOPK, SLOWEST = "topk", "adatopk", "slowest"
SPARSE_RULES = (TOPK, ADATOPK, SLOWEST)
AS_SLOW = 0.9  # of the slowest link's seconds: measurements of one link waver
UNMEASURED_BPS = 2e7  # bits/s of a line that nothing is known of, for a cache that is fetched
MAX_CHANGES = 64  # of one session between two of its hops: a conversation of as many texts


@dataclass(frozen=True)
class Demands:
    """Demands on a link that chooses among codecs.

    A transfer may take `share` of the seconds that it has, and at least `least_s`. Only where it would take `easy_share` with a
    milder codec, that codec is worth a try. `ladder` ends with the coarsest codec that the receiver's quality bears. `hurry` is
    the number of choices in a row that ask for more compression before it is taken up.
    """

    ladder: Sequence[Codec] = LADDER
    share: float = 0.8  # the rest is for whoever shares the link
    easy_share: float = 0.5
    least_s: float = 0.0
    hurry: int = HURRY


MICROBATCHES = Demands()
"""Microbatches in flight; the seconds are the beat."""

NARROW = Demands((Codec.INT8, Codec.INT4))
"""Microbatches in flight of a model with a bottleneck, whose few numbers lose next to nothing by 8 bits"""

NOTICED_S = 0.001
PROMPT = Demands(least_s=NOTICED_S, hurry=1)
"""Prompt of a session, whose codec is chosen once; the seconds are those of the pass."""

STEPS = Demands((Codec.NONE, Codec.BF16, Codec.INT8), share=0.1, least_s=NOTICED_S, hurry=1)
"""Steps of a session, each of which makes a token; the seconds are those of the pass and of the round trip."""


@dataclass(frozen=True)
class Choice:
    """Chosen codec, the share of elements that top-k keeps, and the reason in words."""

    codec: Codec
    reason: str
    topk_share: float = 1.0


UNKNOWN = Choice(Codec.NONE, "nothing is known of the link yet")

Link = TypeVar("Link", bound=Hashable)


class LinkDurations:
    """Seconds that a microbatch's values take uncompressed over each link, by direction. They are kept for the current and the
    previous step, so that peers of earlier steps are forgotten."""

    def __init__(self) -> None:
        self._now_s: dict[Hashable, float] = {}
        self._before_s: dict[Hashable, float] = {}

    @property
    def slowest_s(self) -> float:
        """The longest time of a link, in seconds; 0 if none is known."""
        return max((*self._now_s.values(), *self._before_s.values()), default=0.0)

    def record(self, link: Hashable, values: Sequence[TensorInfo], bandwidth_bps: float | None) -> float | None:
        """Record that `values`, in any encoding, cross a link. Returns the seconds that they would take uncompressed, or
        None if the bandwidth is unknown."""
        if not bandwidth_bps:
            return None
        self._now_s[link] = found_s = encoded_bytes(values, Codec.NONE) * 8 / bandwidth_bps
        return found_s

    def end_step(self) -> None:
        """Begin a new step, and forget the links of the step before the last one."""
        self._before_s, self._now_s = self._now_s, {}


@dataclass
class _LinkState:
    """Place of a link on the ladder, and the choice that follows from it."""

    choice: Choice
    rung: int = 0
    wishes: int = 0  # looks in a row: above zero for more compression, below for less
    wanted: int = 0  # the mildest rung that they ask for


class LinkCodecs(Generic[Link]):
    """Choice of the codec for each link of a sender, in each direction by itself, among the `allowed` codecs of the swarm.

    The rule of `compression` is "auto", the name of a codec for all links, or a rule of top-k, which compares each link with the
    slowest one. "auto" chooses the mildest codec by which a link meets the `demands`.
    """

    def __init__(
        self, allowed: Collection[int], compression: Compression | None = None, demands: Demands = MICROBATCHES
    ) -> None:
        self.choices: dict[Link, Choice] = {}
        self.durations = LinkDurations()
        self._demands = demands
        self._ladder = [codec for codec in demands.ladder if codec in allowed] or [Codec.NONE]
        self.adopt(compression or Compression())

    def adopt(self, compression: Compression) -> None:
        """Choose by another rule from now on. `choices` keeps the former ones until each link is chosen for again."""
        self._compression = compression
        if compression.rule == AUTO and len(self._ladder) > 1:
            self._only = None
        else:
            codec = self._ladder[0] if compression.rule == AUTO else codec_of(compression.rule)
            self._only = Choice(codec, "the only codec that is allowed")
        self._states: dict[Link, _LinkState] = {}

    @property
    def adapted(self) -> Collection[Link]:
        """Links whose codec has been chosen by their bandwidth since the rule was adopted."""
        return self._states.keys()

    def choose(
        self,
        link: Link,
        values: Sequence[TensorInfo],
        bandwidth_bps: float | None,
        room_s: float,
        *,
        directions: int = 1,
        slowest_s: float = 0.0,
    ) -> Choice:
        """Return the choice for the next values on a link: the earlier one if too little is known.

        Args:
            link: Receiver, and direction through the model.
            values: Descriptors of the values.
            bandwidth_bps: Bandwidth of the link; None if unknown.
            room_s: Seconds that the demands count with; 0 if unknown.
            directions: Number of directions that share the sender's uplink.
            slowest_s: Seconds of the swarm's slowest link, for top-k; 0: those of the slowest in `durations`.
        """
        link_s = self.durations.record(link, values, bandwidth_bps)
        if self._compression.rule in SPARSE_RULES:
            choice = self._sparse(link_s, slowest_s or self.durations.slowest_s)
        elif self._only is not None:
            choice = self._only
        else:
            state = self._states.setdefault(link, _LinkState(Choice(self._ladder[0], UNKNOWN.reason)))
            if bandwidth_bps and max(room_s, self._demands.least_s) > 0:
                self._move(state, values, bandwidth_bps, room_s, directions)
            choice = state.choice
        self.choices[link] = choice
        return choice

    def _move(
        self, state: _LinkState, values: Sequence[TensorInfo], bandwidth_bps: float, room_s: float, directions: int
    ) -> None:
        """Move a link to the mildest rung that keeps up, after as many looks that ask for it as the demands say; or to the
        milder rung beside its own, after `PATIENCE` looks that allow it."""
        demands, ladder = self._demands, self._ladder

        def least_that_keeps_up(share: float) -> int:
            most_s = max(demands.least_s, share * room_s / directions)
            return ladder.index(mildest(ladder, values, bandwidth_bps, most_s))

        wanted = least_that_keeps_up(demands.share)
        if wanted > state.rung:
            state.wanted = wanted if state.wishes <= 0 else min(wanted, state.wanted)
            state.wishes = max(1, state.wishes + 1)
        elif least_that_keeps_up(demands.easy_share) < state.rung:
            state.wishes = min(-1, state.wishes - 1)
        else:
            state.wishes = 0
        if state.wishes >= demands.hurry:
            state.rung, state.wishes = state.wanted, 0
        elif state.wishes <= -PATIENCE:
            state.rung, state.wishes = state.rung - 1, 0
        plain_bytes, sent_bytes = (encoded_bytes(values, codec) for codec in (Codec.NONE, ladder[state.rung]))
        state.choice = Choice(
            ladder[state.rung],
            f"{plain_bytes / 1e6:.2f} MB at {bandwidth_bps / 1e6:.3g} Mbit/s take "
            f"{plain_bytes * 8 / bandwidth_bps:.3g} s uncompressed, {sent_bytes * 8 / bandwidth_bps:.3g} s so; "
            f"the slowest stage needs {room_s:.3g} s for a microbatch",
        )

    def _sparse(self, link_s: float | None, slowest_s: float) -> Choice:
        """Choose top-k's ratio by comparison with the slowest link; `UNKNOWN` if the link's bandwidth is unknown."""
        if link_s is None:
            return UNKNOWN
        rule = self._compression.rule
        ratio = topk_ratio(rule, link_s, slowest_s, self._compression.ratio)
        seen = f"{link_s:.3g} s, while the slowest link takes {slowest_s:.3g} s"
        if ratio <= 1:
            return Choice(Codec.NONE, f"{rule}: {seen}")
        return Choice(Codec.TOPK, f"{rule} keeps 1 / {ratio:.3g} of the elements: {seen}", 1 / ratio)


def codec_of(rule: str) -> Codec:
    """Return the codec of `rule`. Raises KeyError if the rule is `auto` or unknown."""
    return Codec.TOPK if rule in SPARSE_RULES else Codec[rule.upper()]


def is_allowed(rule: str, codecs: Collection[int]) -> bool:
    """Return whether a swarm with `codecs` allows `rule`; always True for `auto`. Raises KeyError if `rule` is unknown."""
    return rule == AUTO or codec_of(rule) in (Codec.NONE, *codecs)


def topk_ratio(rule: str, link_s: float, slowest_s: float, largest: float) -> float:
    """Return the divisor of the number of elements on a link, from 1 (send all) to `largest`. The link takes `link_s` seconds for
    uncompressed elements, the slowest link of all takes `slowest_s`."""
    if rule == TOPK:
        return largest
    slowness = link_s / slowest_s if slowest_s > 0 else 0.0
    if rule == SLOWEST:
        return largest if slowness >= AS_SLOW else 1.0
    return min(max(largest * slowness, 1.0), largest)


def slowest_link_s(reported_s: Iterable[float]) -> float:
    """Return the seconds of the slowest link, given each peer's own slowest; 0 if fewer than two peers report.

    It is the second longest time of all: a link has two ends, and both have measured it. So one peer alone makes no link the
    slowest that is not, and hides none but its own.
    """
    longest = sorted(reported_s, reverse=True)[:2]
    return longest[1] if len(longest) == 2 else 0.0


def mildest(ladder: Sequence[Codec], values: Sequence[TensorInfo], bandwidth_bps: float, room_s: float) -> Codec:
    """Return the first codec of `ladder` that lets `values` cross the link within `room_s` seconds; the last if none does."""
    fitting = (codec for codec in ladder if encoded_bytes(values, codec) * 8 <= room_s * bandwidth_bps)
    return next(fitting, ladder[-1])


def encoded_bytes(values: Sequence[TensorInfo], codec: Codec, topk_share: float = 0.0) -> int:
    """Return the encoded size of `values` in bytes; `topk_share` is the share of elements that top-k keeps. Only floats are
    compressed: whole numbers are token ids or labels."""
    size_bytes = 0
    for info in values:
        used = codec if info.dtype in FLOAT_DTYPES else Codec.NONE
        kept = round(topk_share * math.prod(info.shape)) if used == Codec.TOPK else 0
        size_bytes += payload_bytes(TensorInfo(used, info.dtype, info.shape, kept))
    return size_bytes


@dataclass(frozen=True)
class BoundaryForm:
    """Form of the values between two stages of a training: a codec, and `divisor`, the hidden size over the numbers of a bottleneck
    (1: no bottleneck). `steps`: steps to a loss, relative to those without compression."""

    divisor: int
    codec: Codec
    steps: float = 1.0

    def token_bytes(self, hidden: int) -> float:
        """Return the bytes of a token of a model of this hidden size, one way, with scales."""
        shape = (TOKENS, max(1, hidden // self.divisor))
        return encoded_bytes((TensorInfo(Codec.NONE, DType.FLOAT32, shape),), self.codec) / TOKENS

    def describe(self, hidden: int) -> str:
        """Return the form as text, as in "a bottleneck of 256 with int8"."""
        named = self.codec.name.lower()
        return named if self.divisor == 1 else f"a bottleneck of {max(1, hidden // self.divisor)} with {named}"


FORMS = (
    *(BoundaryForm(1, codec, steps) for codec, steps in ((Codec.BF16, 1.0), (Codec.INT8, 1.0), (Codec.INT4, 1.09))),
    BoundaryForm(8, Codec.INT8, 1.01),
    BoundaryForm(16, Codec.INT8, 1.03),
)
"""Forms from the mildest on. Steps are those of the curve with anchors, see docs/decisions/thin-boundaries.md"""
TOKENS = 1024  # of a microbatch
CLEARLY = 1.5  # times as fast a bottleneck must be, which stays a part of the model, as the best codec


def choose_form(
    line_bps: float, tokens_per_s: float, hidden: int, forms: Sequence[BoundaryForm] = FORMS
) -> BoundaryForm:
    """Return the form by which a training reaches a loss soonest.

    Args:
        line_bps: Bit/s of the slowest line between two stages, one way.
        tokens_per_s: Tokens/s that the slowest stage computes, there and back.
        hidden: Hidden size of the model.
        forms: Forms, the mildest first; of equally fast ones the first is chosen, a bottleneck only if it is `CLEARLY` faster than
            all without.
    """

    def seconds(form: BoundaryForm) -> float:
        counted = form.steps * (1.0 if form.divisor == 1 else CLEARLY)
        return counted * max(1 / tokens_per_s, 8 * form.token_bytes(hidden) / line_bps)

    return min(forms, key=seconds)


def coarsest(codecs: Iterable[Codec]) -> Codec:
    """Return the codec that loses most; `Codec.NONE` if `codecs` is empty."""
    return max(codecs, key=COARSENESS.index, default=Codec.NONE)


class CodecSchedule:
    """Codecs by position: `first`, then a new codec at each change."""

    def __init__(self, first: Codec, changes: Iterable[tuple[int, Codec]] = ()) -> None:
        self._first = first
        self._changes = dict(sorted(changes)[:MAX_CHANGES])

    @property
    def changes(self) -> tuple[tuple[int, Codec], ...]:
        """Changes as (first position, codec), by rising position."""
        return tuple(self._changes.items())

    @property
    def full(self) -> bool:
        """Whether the schedule holds `MAX_CHANGES` changes."""
        return len(self._changes) >= MAX_CHANGES

    def at(self, position: int) -> Codec:
        """Return the codec that is used at `position`."""
        return next((codec for start, codec in reversed(self.changes) if start <= position), self._first)

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int, Codec]]:
        """Yield the positions [start, end) as (start, end, codec), cut at each change of codec."""
        edges = [start, *(at for at, _ in self.changes if start < at < end), end]
        for begin, until in itertools.pairwise(edges):
            yield begin, until, self.at(begin)

    def is_chosen(self, start: int, end: int) -> bool:
        """Return whether a change lies in [start, end)."""
        return any(start <= at < end for at in self._changes)

    def coarsest(self, end: int) -> Codec:
        """Return the coarsest codec of the positions below `end`; `Codec.NONE` if `end` is 0."""
        return coarsest(codec for _, _, codec in self.pieces(0, end)) if end else Codec.NONE

    def change(self, start: int, codec: Codec) -> None:
        """Use `codec` from position `start` on and drop all changes at or after `start`."""
        self.truncate(start)
        self._changes = {**self._changes, start: codec}  # another thread may be reading the former

    def merge(self, changes: Iterable[tuple[int, Codec]]) -> None:
        """Add `changes`, pairs of a position and the codec from there on. Changes that are already known at the same positions
        stay. Keeps the first `MAX_CHANGES`."""
        self._changes = dict(sorted({**dict(changes), **self._changes}.items())[:MAX_CHANGES])

    def truncate(self, to: int) -> None:
        """Drop the changes of codec from position `to` on."""
        self._changes = {at: codec for at, codec in self._changes.items() if at < to}


def takes_over(cache_bytes: int, text_bytes: int, replay_s: float, bandwidth_bps: float, *, within_s: float) -> bool:
    """Return whether a hop fetches the cache of a session from the hop that it replaces, rather than compute the text again in
    `replay_s` seconds: the cache is smaller than the text's `text_bytes`, or comes sooner.

    False if it cannot come in `within_s` seconds at `bandwidth_bps` (0: not known), or if `cache_bytes` is 0: there is none.
    """
    bps = bandwidth_bps or UNMEASURED_BPS
    return 0 < cache_bytes * 8 <= within_s * bps and (cache_bytes - text_bytes) * 8 / bps < replay_s
