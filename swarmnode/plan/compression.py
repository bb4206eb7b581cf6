"""Compression of the data on a link: just enough to take the link off the critical path.

A pipeline's beat is what one microbatch costs its slowest stage in computing. With several microbatches in flight a link's delay is
hidden, its throughput is not: a link keeps up where the bytes of a microbatch take less than a beat. So the mildest rung of
the ladder is chosen that does. Each direction of each link chooses by itself, from what its receiver measured.

Codec of a session's hidden states on their way into a layer, by position, so that a second sender sends the same bytes.

A codec is chosen once for the prompt of a text and once for its steps. A prompt is many positions at once, so the link must keep
up with the pass that computes them, as in training. A step is one position that waits for its transfer; a transfer that is
short beside the pass and the round trip is not worth a loss of precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.codec.tensors import FLOAT_DTYPES, Codec, TensorInfo, payload_bytes
from swarmnode.swarm.records.run import AUTO

LADDER = (Codec.NONE, Codec.BF16, Codec.INT8, Codec.INT4)
SHARE = 0.8  # of the beat that a transfer may take: the rest is for whoever shares the link
EASY_SHARE = 0.5  # below it a milder rung is worth a try
HURRY = 2  # looks in a row that ask for more compression before it is taken up
PATIENCE = 16  # looks in a row that would allow less
TOPK, ADATOPK, SLOWEST = "topk", "adatopk", "slowest"
SPARSE_RULES = (TOPK, ADATOPK, SLOWEST)
AS_SLOW = 0.9  # of the slowest link's seconds: measurements of one link waver


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


def slowest_link_s(told: Iterable[float]) -> float:
    """Return the seconds of the slowest link, given each peer's own slowest; 0 if fewer than two peers report.

    It is the second longest time of all: a link has two ends, and both have measured it. So one peer alone makes no link the
    slowest that is not, and hides none but its own.
    """
    longest = sorted(told, reverse=True)[:2]
    return longest[1] if len(longest) == 2 else 0.0


@dataclass(frozen=True)
class Choice:
    """Chosen codec, the share of elements that top-k keeps, and the reason in words."""

    codec: Codec
    reason: str
    keep: float = 1.0


@dataclass(frozen=True)
class Look:
    """Facts that a sender has before it sends: descriptors of the values, the link's bandwidth (None if unknown), the beat (0 if
    unknown) and the number of directions that share its uplink."""

    values: Sequence[TensorInfo]
    bandwidth_bps: float | None
    beat_s: float
    directions: int = 1


class Controller:
    """Chooser of the codec for one direction of one link, among the `allowed` codecs of the swarm."""

    def __init__(self, allowed: Collection[int]) -> None:
        self._ladder = [codec for codec in LADDER if codec in allowed] or [Codec.NONE]
        self._rung = 0
        self._wishes = 0  # looks in a row: above zero for more compression, below for less
        self._wanted = 0  # the mildest of what they ask for
        self.choice = Choice(self._ladder[0], "nothing is known of the link yet")

    def look(self, look: Look) -> Choice:
        """Return the choice of a codec for the next values; the earlier choice if the link's bandwidth or the time per microbatch
        is unknown."""
        if len(self._ladder) == 1:
            self.choice = Choice(self._ladder[0], "the only codec that is allowed")
        elif look.bandwidth_bps and look.beat_s > 0:
            self._consider(look)
        return self.choice

    def _consider(self, look: Look) -> None:
        wanted = self._least_that_keeps_up(look, SHARE)
        if wanted > self._rung:
            self._wanted = wanted if self._wishes <= 0 else min(wanted, self._wanted)
            self._wishes = max(1, self._wishes + 1)
        elif self._least_that_keeps_up(look, EASY_SHARE) < self._rung:
            self._wishes = min(-1, self._wishes - 1)
        else:
            self._wishes = 0
        if self._wishes >= HURRY:
            self._move(self._wanted)
        elif self._wishes <= -PATIENCE:
            self._move(self._rung - 1)
        self.choice = Choice(self._ladder[self._rung], self._reason(look))

    def _move(self, rung: int) -> None:
        self._rung, self._wishes = rung, 0

    def _least_that_keeps_up(self, look: Look, share: float) -> int:
        assert look.bandwidth_bps
        room_s = share * look.beat_s / look.directions
        return self._ladder.index(mildest(self._ladder, look.values, look.bandwidth_bps, room_s))

    def _seconds(self, look: Look, rung: int) -> float:
        assert look.bandwidth_bps
        return encoded_bytes(look.values, self._ladder[rung]) * 8 / look.bandwidth_bps

    def _reason(self, look: Look) -> str:
        assert look.bandwidth_bps
        plain_bytes = encoded_bytes(look.values, Codec.NONE)
        return (
            f"{plain_bytes / 1e6:.2f} MB at {look.bandwidth_bps / 1e6:.3g} Mbit/s take "
            f"{plain_bytes * 8 / look.bandwidth_bps:.3g} s uncompressed, {self._seconds(look, self._rung):.3g} s so; "
            f"the slowest stage needs {look.beat_s:.3g} s for a microbatch"
        )


def mildest(ladder: Sequence[Codec], values: Sequence[TensorInfo], bandwidth_bps: float, room_s: float) -> Codec:
    """Return the first codec of `ladder` that lets `values` cross the link within `room_s` seconds; the last if none does."""
    fitting = (codec for codec in ladder if encoded_bytes(values, codec) * 8 <= room_s * bandwidth_bps)
    return next(fitting, ladder[-1])


def encoded_bytes(values: Sequence[TensorInfo], codec: Codec) -> int:
    """Return the encoded size of `values` in bytes. Only floats are compressed: whole numbers are token ids or labels."""
    return sum(
        payload_bytes(TensorInfo(codec if info.dtype in FLOAT_DTYPES else Codec.NONE, info.dtype, info.shape))
        for info in values
    )


MAX_CHANGES = 64  # of one session between two of its hops: a conversation of as many texts
PROMPT_LADDER: Sequence[Codec] = LADDER
STEP_LADDER: Sequence[Codec] = (Codec.NONE, Codec.BF16, Codec.INT8)  # every step makes a token
STEP_SHARE = 0.1  # of what a step takes anyway
NOTICED_S = 0.001
COARSENESS = (Codec.NONE, Codec.FP16, Codec.BF16, Codec.INT8, Codec.INT4, Codec.INT2, Codec.TOPK, Codec.TOPK2)


@dataclass(frozen=True)
class LinkView:
    """Link for the next pass: its bandwidth, its round trip and the seconds of the pass itself."""

    bandwidth_bps: float
    rtt_s: float
    pass_s: float


def choose(states: TensorInfo, link: LinkView, allowed: Collection[int], *, is_step: bool) -> Codec:
    """Return the mildest of the `allowed` codecs that lets the link keep up; the coarsest usable codec if none does."""
    ladder = STEP_LADDER if is_step else PROMPT_LADDER
    room_s = STEP_SHARE * (link.pass_s + link.rtt_s) if is_step else SHARE * link.pass_s
    usable = [codec for codec in ladder if codec in allowed] or [Codec.NONE]
    return mildest(usable, [states], link.bandwidth_bps, max(NOTICED_S, room_s))


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

    def take_up(self, changes: Iterable[tuple[int, Codec]]) -> None:
        """Add `changes`, pairs of a position and the codec from there on. Changes that are already known at the same positions
        stay. Keeps the first `MAX_CHANGES`."""
        self._changes = dict(sorted({**dict(changes), **self._changes}.items())[:MAX_CHANGES])

    def truncate(self, to: int) -> None:
        """Drop the changes of codec from position `to` on."""
        self._changes = {at: codec for at, codec in self._changes.items() if at < to}
