"""Sections of an announcement, each filled by the part of the node that knows its fields.

A field that a section leaves UNSET keeps its announced value. On the wire an announcement is one flat array
(`announcement.py`): names and nesting would take bytes that round trips need.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType


class StepLoad(NamedTuple):
    """Work of one training step: its microbatches, positions of a microbatch, and averaged gradient bytes per 1,000
    parameters.

    All are 0 if there is no run.
    """

    microbatches: int = 0
    positions: int = 0
    averaged_millibytes: int = 0

    @property
    def all_positions(self) -> int:
        """Positions in one step; 0 if there is no run."""
        return self.microbatches * self.positions


def middle_load(told: Iterable[StepLoad]) -> StepLoad:
    """Return, figure by figure, the median of the known loads, so that no single peer decides it. All figures are 0 if
    none is known."""
    known = [load for load in told if load.all_positions]
    return StepLoad(*map(statistics.median_low, zip(*known, strict=True))) if known else StepLoad()


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """Part of an announcement, filled by one part of the node. Fields are those of `Announcement`, with their units and
    bounds."""


class Introduction(Section, frozen=True, kw_only=True):
    """Section of an announcement with the name and the addresses of the peer. Filled by the host."""

    name: str | UnsetType = UNSET
    addresses: tuple[str, ...] | UnsetType = UNSET


class Place(Section, frozen=True, kw_only=True):
    """Section of an announcement with the state and the layers of the peer. Filled by the node and its placement."""

    state: int | UnsetType = UNSET
    span: tuple[int, int] | UnsetType = UNSET
    seeds: tuple[int, int] | UnsetType = UNSET


class Machine(Section, frozen=True, kw_only=True):
    """Section of an announcement with the peer's device, number format and memory. Filled by the hardware
    probe; a bootstrap peer that computes nothing gives only the device, `none`."""

    device: str | UnsetType = UNSET
    number_format: str | UnsetType = UNSET
    memory_bytes: int | UnsetType = UNSET


class WorkSpeeds(Section, frozen=True, kw_only=True):
    """Computing speeds that a peer announces, as its `Capability` fills them in; a speed that was not measured is UNSET."""

    decode_units_per_s: float | UnsetType = UNSET
    prefill_units_per_s: float | UnsetType = UNSET
    training_units_per_s: float | UnsetType = UNSET
    parallel_speedup: float | UnsetType = UNSET
    pair_units_per_s: float | UnsetType = UNSET


class ServingLoad(Section, frozen=True, kw_only=True):
    """Section of an announcement: the number of sessions, the cache positions that are free, the guesses that a session may have
    in flight, and the name of the draft model. Filled by the serving stage."""

    sessions: int | UnsetType = UNSET
    cache_tokens_free: int | UnsetType = UNSET
    drafts: int | UnsetType = UNSET
    draft_model: str | UnsetType = UNSET


class TuningOffer(Section, frozen=True, kw_only=True):
    """Section of an announcement with the share of its time that the peer lends to tuning adapters, in percent. Filled by the
    tuning stage."""

    tune_percent: int | UnsetType = UNSET


class TrainingNews(Section, frozen=True, kw_only=True):
    """Section of an announcement with the step, load and codecs of the training. Filled by the training worker."""

    training_step: int | UnsetType = UNSET
    step_load: tuple[int, int, int] | UnsetType = UNSET
    sends: dict[bytes, int] | UnsetType = UNSET


class DiskOffer(Section, frozen=True, kw_only=True):
    """Section of an announcement with the disk space for training states of other peers. Filled by the backup server."""

    backup_bytes: int | UnsetType = UNSET


class PathNews(Section, frozen=True, kw_only=True):
    """Section of an announcement with measured links: bandwidths, round trips, coordinate and reachability. Filled by the paths."""

    up_bps: float | UnsetType = UNSET
    down_bps: float | UnsetType = UNSET
    rtt_us: dict[bytes, int] | UnsetType = UNSET
    path_kbps: dict[bytes, int] | UnsetType = UNSET
    coordinate: tuple[int, ...] | UnsetType = UNSET
    reachability: int | UnsetType = UNSET


class Hearsay(Section, frozen=True, kw_only=True):
    """Section of an announcement with the speeds of other peers, as this peer measured them in use. Filled by the observed
    latency."""

    unit_us: dict[bytes, int] | UnsetType = UNSET


SECTIONS = (
    Introduction,
    Place,
    Machine,
    WorkSpeeds,
    ServingLoad,
    TuningOffer,
    TrainingNews,
    DiskOffer,
    PathNews,
    Hearsay,
)


def said(sections: Iterable[Section]) -> dict[str, Any]:
    """Return the set fields of all sections; of a field that is set twice, the later value counts."""
    told = ((name, getattr(section, name)) for section in sections for name in section.__struct_fields__)
    return {name: value for name, value in told if value is not UNSET}
