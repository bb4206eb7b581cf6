"""A month's bytes, over restarts and into the next month."""

from __future__ import annotations

import datetime
from pathlib import Path

from swarmnode.lending.rule_watch import KEEP_BYTES, MONTHS, MonthlyTraffic, month_of


def test_it_counts_over_restarts_and_begins_anew_each_month(tmp_path: Path) -> None:
    moved, today = 5, datetime.date(2026, 11, 30)
    month = MonthlyTraffic(tmp_path, lambda: moved, today=lambda: today)
    moved += 100
    assert month() == 100
    moved += KEEP_BYTES
    assert month() == KEEP_BYTES + 100
    again = MonthlyTraffic(tmp_path, lambda: 0, today=lambda: today)
    assert again() == KEEP_BYTES + 100
    today = datetime.date(2026, 12, 1)
    assert again() == 0


def test_a_clock_that_jumps_away_and_back_gives_no_second_quota(tmp_path: Path) -> None:
    """A machine without a clock of its own believes for its first minute that it is 1970."""
    moved, today = 0, datetime.date(2026, 11, 30)
    month = MonthlyTraffic(tmp_path, lambda: moved, today=lambda: today)
    moved = 500
    assert month() == 500
    for year in range(1970, 1990):
        today = datetime.date(year, 1, 1)
        assert month() == 0
        today = datetime.date(2026, 11, 30)
        assert month() == 500
    assert MonthlyTraffic(tmp_path, lambda: 0, today=lambda: today)() == 500
    assert len(month._stored.bytes) <= MONTHS


def test_a_damaged_file_counts_from_nothing(tmp_path: Path) -> None:
    (tmp_path / "month.json").write_text("[]")
    assert MonthlyTraffic(tmp_path, lambda: 7)() == 0
    (tmp_path / "month.json").unlink()
    (tmp_path / "month.json").mkdir()
    assert MonthlyTraffic(tmp_path, lambda: 7)() == 0


def test_a_month_that_begins_on_another_day() -> None:
    days = [datetime.date(2026, 1, 14), datetime.date(2026, 1, 15), datetime.date(2026, 2, 14)]
    assert [month_of(day, 15) for day in days] == ["2025-12", "2026-01", "2026-01"]
    assert [month_of(day, 1) for day in days] == ["2026-01", "2026-01", "2026-02"]
