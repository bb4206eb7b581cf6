"""Cohorts and the budget: growth, regrouping, and never a byte more than allowed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.cache import (
    MAX_PADDING,
    SMALL_COLUMNS,
    CachePool,
    Claim,
    OutOfCache,
    capacity_for,
    partition_by_length,
)
from swarmnode.compute.serving.cohort import ROLLBACK, CachedSession, Cohort, Window
from swarmnode.compute.serving.loading import load_span
from swarmnode.errors import ProtocolError

LAYERS = range(1, 3)


@pytest.fixture(scope="module")
def span(checkpoint_path):
    return load_span(Checkpoint(checkpoint_path), 2, 4)


PER_TOKEN = 3 * 2 * 2 * 16 * 4  # layers and one more for regrouping, keys and values, heads, dim, bytes


def fill(pool: CachePool, session: CachedSession, count: int, value: float) -> None:
    """Write `count` columns of a value, as a pass over this session alone would."""
    (cohort,) = pool.prepare([session], count)
    states = torch.full((session.rows, 2, count, 16), value)
    for layer in LAYERS:
        cohort.update(states, -states, layer)
    cohort.advance({session: count})


def columns(session: CachedSession, layer: int = 1) -> torch.Tensor:
    """What the session's first row holds, one number per column."""
    cohort = session.cohort
    keys, values = cohort.buffers[layer]
    held = keys[session.row_slice, :, cohort.columns_of(session)]
    assert torch.equal(held, -values[session.row_slice, :, cohort.columns_of(session)])
    return held[0, 0, :, 0]


def open_session(pool: CachePool, name: str, max_length: int = 400, rows: int = 1) -> CachedSession:
    return pool.open(name, rows=rows, max_length=max_length, layers=LAYERS)


def test_who_comes_does_not_look_through_the_layers_of_all_who_are_kept(span, monkeypatch):
    pool = CachePool(span, 1 << 26)
    for number in range(64):
        fill(pool, open_session(pool, f"kept {number}"), 1 + number, 1.0)
    looked = []
    monkeypatch.setattr(
        span,
        "family",
        SimpleNamespace(
            layer_cache_bytes=lambda unit, *_: looked.append(unit) or PER_TOKEN // 3,
            layer_state_bytes=lambda *_: 0,
            state_shapes=[()] * 99,
        ),
    )
    fill(pool, open_session(pool, "new"), 1, 1.0)
    pool.close("kept 0")
    assert len(looked) <= 3 * len(LAYERS), "of its own sizes"


def test_buffers_grow_and_keep_what_they_hold(span):
    pool = CachePool(span, 1 << 24)
    session = open_session(pool, "a")
    for step in range(300):
        fill(pool, session, 1, float(step))
    assert torch.equal(columns(session), torch.arange(300.0))
    assert session.cohort.capacity <= 400
    assert pool.allocated_bytes == session.cohort.capacity * PER_TOKEN
    assert pool.reserved_bytes == 400 * PER_TOKEN


def test_regrouping_keeps_everybody(span):
    pool = CachePool(span, 1 << 24)
    a, b, c = (open_session(pool, name) for name in "abc")
    for session, count in ((a, 10), (b, 25), (c, 17)):
        fill(pool, session, count, float(count))
    (all_three,) = pool.prepare([a, b, c], 1)
    assert all_three.rows == 3
    assert all_three.attention_mask(1).sum(1).tolist() == [member.length + 1 for member in all_three.members]
    assert all_three.position_ids(1)[:, 0].tolist() == [member.length for member in all_three.members]
    (alone,) = pool.prepare([b], 1)
    assert alone.members == [b]
    assert set(a.cohort.members) == {a, c}
    assert alone.attention_mask(1) is None
    for session, count in ((a, 10), (b, 25), (c, 17)):
        assert columns(session).tolist() == [float(count)] * count


def step(pool: CachePool, sessions: list[CachedSession], value: float) -> Cohort:
    """A pass over one new position of these sessions."""
    (cohort,) = pool.prepare(sessions, 1)
    for layer in LAYERS:
        states = torch.full((cohort.rows, 2, 1, 16), value)
        cohort.update(states, -states, layer)
    cohort.advance(dict.fromkeys(cohort.present, 1))
    return cohort


def test_an_absent_session_lags_and_comes_back(span):
    """Who misses a step or two is moved up alone; who stays away is left behind."""
    pool = CachePool(span, 1 << 24)
    a, b, c = (open_session(pool, name) for name in "abc")
    for session, count in ((a, 10), (b, 12), (c, 8)):
        fill(pool, session, count, float(count))
    cohort = step(pool, [a, b, c], 50.0)
    address = cohort.buffers[1][0].data_ptr()
    assert step(pool, [a, b], 51.0) is cohort
    assert step(pool, [a, b], 52.0) is cohort
    assert (a.lag, b.lag, c.lag) == (0, 0, 2)
    assert step(pool, [a, c], 53.0) is cohort
    assert (a.lag, b.lag, c.lag) == (0, 1, 0)
    assert cohort.buffers[1][0].data_ptr() == address
    assert columns(a).tolist() == [10.0] * 10 + [50, 51, 52, 53]
    assert columns(b).tolist() == [12.0] * 12 + [50, 51, 52]
    assert columns(c).tolist() == [8.0] * 8 + [50, 53]
    while step(pool, [a, c], 54.0) is cohort:
        assert b.lag <= 16
    assert b.cohort.members == [b]
    assert columns(b).tolist() == [12.0] * 12 + [50, 51, 52]


def test_rows_of_very_different_lengths_stay_apart():
    short, long = CachedSession(1, 10_000, (), LAYERS), CachedSession(1, 10_000, (), LAYERS)
    short.length, long.length = 50, 5000
    assert partition_by_length([short, long]) == [[long], [short]]
    long.length = 250
    assert partition_by_length([short, long]) == [[long, short]]


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 4)), min_size=1, max_size=40))
def test_at_most_a_quarter_is_padding(shapes):
    """One long session among many half as long would waste nearly half of the memory, and of what each step reads."""
    sessions = [CachedSession(rows, 10_000, (), LAYERS) for _, rows in shapes]
    for session, (length, _) in zip(sessions, shapes, strict=True):
        session.length = length
    parts = partition_by_length(sessions)
    assert sorted(map(id, sessions)) == sorted(id(session) for part in parts for session in part)
    for part in parts:
        columns = [max(session.length, SMALL_COLUMNS) for session in part for _ in range(session.rows)]
        assert sum(columns) >= (1 - MAX_PADDING) * len(columns) * max(columns)
    longest = max(session.length for session in sessions)
    assert len(parts) <= 1 + math.log(max(longest, SMALL_COLUMNS) / SMALL_COLUMNS, 4 / 3)  # passes of a step


def test_capacity_is_bounded_by_what_sessions_may_use():
    session = CachedSession(1, 100, (), LAYERS)
    session.length = 90
    assert capacity_for([session], 1) == 100
    session.length = 10
    assert capacity_for([session], 1) == 75


def test_the_budget_holds_whatever_happens(span):
    """Reservations fill the budget; any order of steps and sets stays within it, though cohorts would take more."""
    budget = 3 * 200 * PER_TOKEN
    pool = CachePool(span, budget)
    sessions = [open_session(pool, name, 200) for name in "abc"]
    assert pool.reserved_bytes == pool.budget.limit_bytes
    with pytest.raises(OutOfCache):
        open_session(pool, "d", 1)
    fill(pool, sessions[0], 150, 1.0)
    generator = torch.Generator().manual_seed(0)
    while min(session.length for session in sessions) < 190:
        chosen = [s for s in sessions if s.length < 200 and torch.rand(1, generator=generator) < 0.8]
        for cohort in pool.prepare(chosen, 1) if chosen else ():
            states = torch.ones(cohort.rows, 2, 1, 16)
            for layer in LAYERS:
                cohort.update(states, -states, layer)
            cohort.advance(dict.fromkeys(cohort.present, 1))
            assert pool.allocated_bytes <= pool.budget.limit_bytes
    pool.close("a")
    assert open_session(pool, "d", 200)


def test_closing_frees(span):
    pool = CachePool(span, 1 << 24)
    a, b = open_session(pool, "a"), open_session(pool, "b")
    fill(pool, a, 30, 1.0)
    fill(pool, b, 20, 2.0)
    pool.prepare([a, b], 1)
    pool.close("a")
    assert columns(b).tolist() == [2.0] * 20
    assert pool.cohorts == [b.cohort]
    pool.close("b")
    pool.close("b")
    assert (pool.allocated_bytes, pool.reserved_bytes) == (0, 0)
    assert repr(pool).startswith("CachePool(0 sessions")


def test_a_session_begins_with_copies_of_another(span):
    """In whatever cohort that one is, and however long it goes on."""
    pool = CachePool(span, 1 << 24)
    source, beside, copy = (open_session(pool, name) for name in ("source", "beside", "copy"))
    for step in range(30):
        fill(pool, source, 1, float(step))
    fill(pool, beside, 40, -1.0)
    next(pool.prepare([source, beside], 1))
    assert source.cohort is beside.cohort
    pool.fork("source", "copy", 20)
    assert torch.equal(columns(copy), torch.arange(20.0)) and copy.cohort is not source.cohort
    assert pool.budget.claimed(Claim.ALLOCATED) == pool.allocated_bytes
    fill(pool, copy, 1, 99.0)
    assert torch.equal(columns(source), torch.arange(30.0))
    pool.close("source")
    assert columns(copy).tolist() == [*range(20), 99.0]


def test_what_is_not_held_is_not_copied(span):
    pool = CachePool(span, 1 << 24)
    source, _ = open_session(pool, "source"), open_session(pool, "copy")
    for length in (1, 0):
        with pytest.raises(ProtocolError):
            pool.fork("source", "copy", length)
    fill(pool, source, 5, 1.0)
    for length in (0, 6):
        with pytest.raises(ProtocolError):
            pool.fork("source", "copy", length)
    pool.fork("source", "copy", 5)


def test_copies_find_room_in_what_is_only_padding(span):
    """Each session may have what it has reserved, whatever others have been given beside it."""
    pool = CachePool(span, 3 * 100 * PER_TOKEN)
    long, short = open_session(pool, "long", 100), open_session(pool, "short", 100)
    fill(pool, long, 90, 1.0)
    fill(pool, short, 10, 2.0)
    list(pool.prepare([long, short], 1))
    copy = open_session(pool, "copy", 100)
    pool.fork("long", "copy", 90)
    assert columns(copy).tolist() == [1.0] * 90
    assert pool.budget.claimed(Claim.ALLOCATED) <= pool.budget.limit_bytes


def test_what_is_promised_of_windows_is_kept(span):
    """Wherever they stand by then; who goes back a little has it always."""
    pool = CachePool(span, 1 << 24, windows={1: Window(16), 2: Window(64)})
    source = open_session(pool, "source", 1000)
    for step in range(400):
        fill(pool, source, 1, float(step))
        promised = [length for length in range(1, source.length + 1) if pool.retains(source.length, length)]
        assert source.floor <= promised[0] <= max(1, source.length - ROLLBACK)
    open_session(pool, "copy", 1000)
    with pytest.raises(ProtocolError):
        pool.fork("source", "copy", source.floor - 1)
    pool.fork("source", "copy", source.floor)


def test_a_copy_of_a_moved_window_is_what_is_seen(span):
    window = Window(16)
    pool = CachePool(span, 1 << 24, windows={1: window})
    source, copy = open_session(pool, "source", 1000), open_session(pool, "copy", 1000)
    for step in range(400):
        fill(pool, source, 1, float(step))
    assert pool.retains(400, 380)
    pool.fork("source", "copy", 380)
    held = copy.cohort.buffers[1][0][0, 0, copy.cohort.held(copy, 1), 0]
    assert held[-window.size + 1 :].tolist() == [float(at) for at in range(380 - window.size + 1, 380)]
    assert copy.floor >= source.floor
