"""Told codecs: what the hops of a session told its client of their codecs, for whoever takes over from one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarmnode.codec.body import MAX_LINK_CODECS
from swarmnode.codec.messages import HopSpec, LinkCodec
from swarmnode.codec.tensors import Codec
from swarmnode.plan.serving.codec_schedule import CodecSchedule
from swarmnode.swarm.records.manifest import SERVING_CODECS


class ToldCodecs:
    """Of one session, by the unit that the states enter."""

    def __init__(self, first: Codec, told: Iterable[LinkCodec] = ()) -> None:
        self._first = first
        self._schedules: dict[int, CodecSchedule] = {}
        for one in told:
            self._note(one)

    def __repr__(self) -> str:
        return f"<ToldCodecs of {len(self._schedules)} units>"

    @property
    def told(self) -> tuple[LinkCodec, ...]:
        """All of it, for OPEN."""
        schedules = self._schedules.items()
        return tuple(LinkCodec(unit, start, codec) for unit, one in schedules for start, codec in one.changes)

    def hear(self, told: LinkCodec, route: Sequence[HopSpec], max_length: int) -> None:
        """A hop has chosen. What none of the route can have chosen is left out, and what no OPEN has room for: else nobody would
        take over from it."""
        is_between = told.unit in {hop.end for hop in route[:-1]} and told.codec in SERVING_CODECS
        if is_between and told.start < max_length and len(self.told) < MAX_LINK_CODECS:
            self._note(told)

    def _note(self, told: LinkCodec) -> None:
        schedule = self._schedules.setdefault(told.unit, CodecSchedule(self._first))
        if not schedule.full:
            schedule.change(told.start, Codec(told.codec))

    def truncate(self, to: int) -> None:
        """The positions from `to` on are to come again."""
        for schedule in self._schedules.values():
            schedule.truncate(to)
