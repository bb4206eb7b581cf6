"""Codec of a session's hidden states on their way into a layer, by position, so that a second sender sends the same bytes.

A codec is chosen once for the prompt of a text and once for its steps. A prompt is many positions at once, so the link must keep
up with the pass that computes them, as in training. A step is one position that waits for its transfer; a transfer that is
short beside the pass and the round trip is not worth a loss of precision.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.plan.compression import LADDER, SHARE, mildest

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
