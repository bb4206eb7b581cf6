"""Announced speeds: kept over restarts, measured anew under other conditions, corrected by real work."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import UNSET

from swarmnode.compute.capacity.capacity import Speeds
from swarmnode.measuring.capability import (
    DEPARTED_PASSES,
    DEPARTED_S,
    MAX_ENTRIES,
    OLD_S,
    Capability,
    Conditions,
    SpeedCache,
    serving_section,
)
from swarmnode.swarm.records.announcement import MAX_PARALLEL_SPEEDUP, WorkSpeeds
from tests.watch import Watch

CONDITIONS = Conditions(
    model="ab" * 32, device="RTX 4090", memory_bytes=24 << 30, number_format="bfloat16 none", threads=8, units=12
)
SPEEDS = Speeds(100.0, 4000.0)


@pytest.fixture
def watch():
    return Watch(1_000_000.0)


def never() -> Speeds:
    raise AssertionError("measured although the cache knows")


def test_a_restart_announces_at_once(tmp_path, watch):
    Capability.of(CONDITIONS, SpeedCache(tmp_path / "new" / "speeds.json", now=watch), lambda: SPEEDS)
    again = Capability.of(CONDITIONS, SpeedCache(tmp_path / "new" / "speeds.json", now=watch), never)
    assert again.section() == WorkSpeeds(decode_units_per_s=100.0, prefill_units_per_s=4000.0)


def test_a_speed_that_does_not_last_is_announced_and_not_kept(tmp_path):
    cache = SpeedCache(tmp_path / "speeds.json")
    capability = Capability.of(CONDITIONS, cache, lambda: Speeds(7.0), lasting=False)
    assert capability.speeds == Speeds(7.0) and cache.find(CONDITIONS) is None and not capability.lasting
    capability.measure(lambda: SPEEDS)
    assert capability.speeds == cache.find(CONDITIONS) == SPEEDS and capability.lasting
    assert Capability.of(CONDITIONS, cache, never, lasting=False).lasting


@pytest.mark.parametrize(
    "change",
    [
        {"device": "RTX 3090"},
        {"memory_bytes": 12 << 30},
        {"number_format": "bfloat16 nf4"},
        {"threads": 4},
        {"units": 13},
        {"model": "cd" * 32},
        {"throttle": 50.0},
    ],
)
def test_other_conditions_are_measured_anew(tmp_path, change):
    cache = SpeedCache(tmp_path / "speeds.json")
    cache.put(CONDITIONS, SPEEDS)
    other = Speeds(7.0)
    assert Capability.of(replace(CONDITIONS, **change), cache, lambda: other).speeds == other
    assert cache.find(CONDITIONS) == SPEEDS


def test_before_a_span_is_loaded_the_most_similar_one_counts(tmp_path):
    cache = SpeedCache(tmp_path / "speeds.json")
    assert cache.nearest(CONDITIONS) == Speeds()
    cache.put(replace(CONDITIONS, units=3), Speeds(3.0))
    cache.put(replace(CONDITIONS, units=10), Speeds(10.0))
    cache.put(replace(CONDITIONS, device="another"), Speeds(99.0))
    assert cache.nearest(CONDITIONS) == Speeds(10.0)
    assert cache.nearest(replace(CONDITIONS, units=5)) == Speeds(3.0)


def test_old_measurements_and_damaged_files_are_not_believed(tmp_path, watch):
    path = tmp_path / "speeds.json"
    cache = SpeedCache(path, now=watch)
    cache.put(CONDITIONS, SPEEDS)
    watch.now_s += OLD_S + 1
    assert cache.find(CONDITIONS) is None
    path.write_bytes(b'{"a": 1')
    assert SpeedCache(path).find(CONDITIONS) is None


def test_nodes_of_one_home_do_not_undo_one_another(tmp_path):
    one, other = SpeedCache(tmp_path / "speeds.json"), SpeedCache(tmp_path / "speeds.json")
    one.put(CONDITIONS, SPEEDS)
    other.put(replace(CONDITIONS, units=3), SPEEDS)
    fresh = SpeedCache(tmp_path / "speeds.json")
    assert fresh.find(CONDITIONS) == fresh.find(replace(CONDITIONS, units=3)) == SPEEDS


def test_the_file_is_bounded_and_its_loss_no_harm(tmp_path, watch):
    cache = SpeedCache(tmp_path / "speeds.json", now=watch)
    for units in range(2 * MAX_ENTRIES):
        watch.now_s += 1
        cache.put(replace(CONDITIONS, units=units), SPEEDS)
    kept = [units for units in range(2 * MAX_ENTRIES) if cache.find(replace(CONDITIONS, units=units))]
    assert kept == list(range(MAX_ENTRIES, 2 * MAX_ENTRIES))
    (tmp_path / "file").write_text("in the way")
    SpeedCache(tmp_path / "file" / "speeds.json").put(CONDITIONS, SPEEDS)


def passes(capability: Capability, watch: Watch, unit_s: float, count: int, every_s: float) -> None:
    for _ in range(count):
        capability.record("decode_units_per_s", unit_s)
        watch.now_s += every_s


def test_real_work_that_departs_for_long_is_announced_and_kept(tmp_path, watch):
    cache = SpeedCache(tmp_path / "speeds.json")
    capability = Capability(SPEEDS, CONDITIONS, cache, clock=watch)
    passes(capability, watch, 0.02, DEPARTED_PASSES + 100, every_s=1.0)
    assert capability.speeds.decode_units_per_s == pytest.approx(50, rel=0.1)
    assert capability.speeds.prefill_units_per_s == 4000
    assert cache.find(CONDITIONS) == capability.speeds


def test_steps_of_two_positions_slow_down_with_single_ones(tmp_path, watch):
    speeds = replace(SPEEDS, pair_units_per_s=160.0)
    capability = Capability(speeds, CONDITIONS, SpeedCache(tmp_path / "speeds.json"), clock=watch)
    passes(capability, watch, 0.02, DEPARTED_PASSES + 100, every_s=1.0)
    single = capability.speeds.decode_units_per_s
    assert single < 60 and capability.speeds.pair_units_per_s == pytest.approx(1.6 * single)


@pytest.mark.parametrize(
    ("tried", "announced"), [(4 * SPEEDS.decode_units_per_s, True), (1.2 * SPEEDS.decode_units_per_s, False)]
)
def test_a_trial_at_what_is_asked_is_announced_at_once_where_it_says_something_else(tmp_path, tried, announced):
    cache = SpeedCache(tmp_path / "speeds.json")
    capability = Capability(SPEEDS, CONDITIONS, cache)
    capability.correct("decode_units_per_s", tried)
    assert capability.speeds.decode_units_per_s == (tried if announced else SPEEDS.decode_units_per_s)
    assert (cache.find(CONDITIONS) == capability.speeds) == announced, "a restart announces it at once"


def test_what_could_not_be_measured_is_taken_from_the_first_real_work(tmp_path):
    capability = Capability(Speeds(), CONDITIONS, SpeedCache(tmp_path / "speeds.json"))
    assert capability.section() == WorkSpeeds()
    capability.record("training_units_per_s", 0.25)
    assert capability.section() == WorkSpeeds(training_units_per_s=4.0)


def test_short_or_small_departures_are_not(tmp_path, watch):
    capability = Capability(SPEEDS, CONDITIONS, SpeedCache(tmp_path / "speeds.json"), clock=watch)
    passes(capability, watch, 0.02, 10 * DEPARTED_PASSES, every_s=0.3 * DEPARTED_S / (10 * DEPARTED_PASSES))
    passes(capability, watch, 0.011, 200, every_s=1.0)
    assert capability.speeds == SPEEDS


@pytest.mark.parametrize(
    ("replicas", "alone", "speedup"),
    [
        ([[(6, 100.0)]], 100.0, 1.0),
        ([[(6, 100.0)], [(6, 100.0)]], 100.0, 2.0),  # on each: for two sessions
        ([[(3, 100.0), (3, 100.0)]], 100.0, 2.0),  # over both: while one is at the second, another is at the first
        ([[(6, 300.0)], [(6, 100.0)]], 200.0, 2.0),
        ([[(1, 100.0), (5, 100.0)]], 100.0, 1.2),  # the longest part is what all wait for
        ([[(6, 100.0)], [(6, 0.0)]], 50.0, 1.0),  # not measured everywhere: nothing is promised
        ([[(6, 0.0)]], UNSET, 1.0),
        ([[(6, 100.0)]] * 40, 100.0, MAX_PARALLEL_SPEEDUP),  # as much as is believed
    ],
)
def test_several_devices_do_more_for_several_sessions(replicas, alone, speedup):
    measured = [[(units, Speeds(decode_units_per_s=speed)) for units, speed in replica] for replica in replicas]
    section = serving_section(measured)
    assert section.decode_units_per_s == (alone if alone is UNSET else pytest.approx(alone))
    assert section.parallel_speedup == pytest.approx(speedup)
