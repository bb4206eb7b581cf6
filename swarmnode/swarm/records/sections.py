"""The sections of an announcement: what a peer says of itself, each filled by the part of the node that knows it.

A field that a section leaves UNSET stays as it was announced before. On the wire an announcement is one flat array
(`announcement.py`), in which names and nesting would cost bytes that round trips need.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType


class StepLoad(NamedTuple):
    """Of one run: the microbatches of a step, positions of one, and bytes of gradients that are averaged in a step for 1,000
    parameters. All 0 where there is no run."""

    microbatches: int = 0
    positions: int = 0
    averaged_millibytes: int = 0

    @property
    def all_positions(self) -> int:
        """That a step computes; 0 where there is no run."""
        return self.microbatches * self.positions


def middle_load(told: Iterable[StepLoad]) -> StepLoad:
    """Of those that are known, figure by figure, the middle one: nobody alone says what others compute by."""
    known = [load for load in told if load.all_positions]
    return StepLoad(*map(statistics.median_low, zip(*known, strict=True))) if known else StepLoad()


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """What one owner says. Fields are those of `Announcement`, with their units and bounds."""


class Introduction(Section, frozen=True, kw_only=True):
    """Who it is, and where it is reached. Of the host."""

    name: str | UnsetType = UNSET
    addresses: tuple[str, ...] | UnsetType = UNSET


class Place(Section, frozen=True, kw_only=True):
    """Where it is in its life and in the model. Of the node and its placement."""

    state: int | UnsetType = UNSET
    span: tuple[int, int] | UnsetType = UNSET
    seeds: tuple[int, int] | UnsetType = UNSET


class Machine(Section, frozen=True, kw_only=True):
    """What it computes on. Of the hardware that was probed."""

    device: str | UnsetType = UNSET
    number_format: str | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET


class WorkSpeeds(Section, frozen=True, kw_only=True):
    """How fast it computes; what was not measured is left UNSET. Of the capability."""

    decode_units_per_s: float | UnsetType = UNSET
    prefill_units_per_s: float | UnsetType = UNSET
    training_units_per_s: float | UnsetType = UNSET
    parallel_speedup: float | UnsetType = UNSET


class ServingLoad(Section, frozen=True, kw_only=True):
    """What it is doing, and has room for. Of the serving stage."""

    sessions: int | UnsetType = UNSET
    cache_tokens_free: int | UnsetType = UNSET


class TrainingNews(Section, frozen=True, kw_only=True):
    """How far it has trained, and of what run, and what it sends values as. Of the training worker."""

    training_step: int | UnsetType = UNSET
    step_load: tuple[int, int, int] | UnsetType = UNSET
    sends: dict[bytes, int] | UnsetType = UNSET


class DiskOffer(Section, frozen=True, kw_only=True):
    """Room for others' training states. Of the backup server."""

    backup_bytes: int | UnsetType = UNSET


class PathNews(Section, frozen=True, kw_only=True):
    """What its links have shown. Of the paths."""

    up_bps: float | UnsetType = UNSET
    down_bps: float | UnsetType = UNSET
    rtt_us: dict[bytes, int] | UnsetType = UNSET
    path_kbps: dict[bytes, int] | UnsetType = UNSET
    coordinate: tuple[int, ...] | UnsetType = UNSET
    reachability: int | UnsetType = UNSET


class Hearsay(Section, frozen=True, kw_only=True):
    """How fast others were while it used them. Of the observed latency."""

    unit_us: dict[bytes, int] | UnsetType = UNSET


SECTIONS = (Introduction, Place, Machine, WorkSpeeds, ServingLoad, TrainingNews, DiskOffer, PathNews, Hearsay)


def said(sections: Iterable[Section]) -> dict[str, Any]:
    """Field by field what the sections say; of two that say the same, the later counts."""
    told = ((name, getattr(section, name)) for section in sections for name in section.__struct_fields__)
    return {name: value for name, value in told if value is not UNSET}
