"""Rules: what they make of what is seen, and how long they hold."""

from __future__ import annotations

import datetime
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from swarmnode.lending.lending import Hours, Lending, LendingEvent, LendingState, Rules, Surroundings, reason_to_pause
from swarmnode.lending.rule_watch import (
    CALM_S,
    SESSION_BUS,
    DesktopNotices,
    Lookout,
    RuleWatch,
    is_metered,
    logind_idle_since,
    memory_pressure,
)
from tests.lending.session_bus import Notice, session_bus

MONDAY_NOON = datetime.datetime(2026, 11, 23, 12)  # of the wall
NIGHT = Hours(datetime.time(22), datetime.time(7))


class CpuTimes(NamedTuple):
    """Of the whole machine, in seconds."""

    user: float
    idle: float


@pytest.mark.parametrize(
    ("rules", "seen", "reason"),
    [
        (Rules(), {}, ""),
        (
            Rules(exclusive=frozenset({"steam", "blender"})),
            {"programs": frozenset({"bash", "steam"})},
            "steam is running",
        ),
        (Rules(exclusive=frozenset({"steam"})), {"programs": frozenset({"steamer"})}, ""),
        (Rules(on_mains=True), {"on_mains": False}, "on battery"),
        (Rules(on_mains=True), {"on_mains": None}, ""),
        (Rules(only_idle_s=600), {"idle_s": 599}, "in use"),
        (Rules(only_idle_s=600), {"idle_s": 600}, ""),
        (Rules(only_idle_s=600), {}, ""),
        (Rules(max_others_load=0.25), {"others_load": 0.3}, "need the CPU"),
        (Rules(max_memory_pressure=0.1), {"memory_pressure": 0.2}, "wait for memory"),
        (Rules(hours=NIGHT), {}, "22:00-07:00"),
        (Rules(days=frozenset({5, 6})), {}, "sat, sun"),
        (Rules(days=frozenset({0})), {}, ""),
        (Rules(monthly_bytes=10**9), {"month_bytes": 10**9}, "1 GB are used up"),
        (Rules(unmetered=True), {"metered": True}, "metered"),
        (Rules(unmetered=True), {}, ""),
        (Rules(max_others_gpu_bytes=10**9), {"others_gpu_bytes": 2 * 10**9}, "card's memory"),
        (Rules(max_others_gpu_bytes=10**9), {"others_gpu_bytes": None}, ""),
        (Rules(max_others_gpu_load=0.25), {"others_gpu_load": 0.3}, "need the card"),
        (Rules(max_others_gpu_load=0.25), {"others_gpu_load": 0.25}, ""),
        (Rules(max_others_gpu_load=0.25), {"others_gpu_load": None}, ""),
    ],
)
def test_reasons(rules: Rules, seen: dict[str, Any], reason: str) -> None:
    told = reason_to_pause(rules, Surroundings(MONDAY_NOON, **seen))
    assert reason in told and bool(reason) == bool(told)


@pytest.mark.parametrize(("hour", "inside"), [(21, False), (22, True), (0, True), (6, True), (7, False), (12, False)])
def test_hours_over_midnight(hour: int, inside: bool) -> None:
    assert NIGHT.contain(datetime.time(hour)) is inside


def test_it_pauses_at_once_and_resumes_after_a_calm_while() -> None:
    now_s = 0.0
    lending = Lending()
    lending.happened(LendingEvent.LOADED)
    lending.follow(Rules(exclusive=frozenset({"game"})))
    watch = RuleWatch(lending, lambda _rules: Surroundings(MONDAY_NOON), clock=lambda: now_s)
    game = Surroundings(MONDAY_NOON, programs=frozenset({"game"}))
    watch.judge(game)
    assert lending.state is LendingState.DRAINING
    lending.happened(LendingEvent.DRAINED)
    for seen, at_s, state in (
        (Surroundings(MONDAY_NOON), CALM_S - 1, LendingState.PAUSED),
        (game, CALM_S - 0.5, LendingState.PAUSED),
        (Surroundings(MONDAY_NOON), CALM_S + 1, LendingState.PAUSED),
        (Surroundings(MONDAY_NOON), 2 * CALM_S, LendingState.WAITING),
    ):
        now_s = at_s
        watch.judge(seen)
        assert lending.state is state, at_s


def test_pauses_and_resumes_by_rule_are_shown_once() -> None:
    """But none while the owner has paused the node anyway."""
    now_s, shown = 0.0, list[tuple[str, str]]()
    lending = Lending()
    lending.follow(Rules(exclusive=frozenset({"game"})))
    watch = RuleWatch(
        lending,
        lambda _rules: Surroundings(MONDAY_NOON),
        show=lambda title, text: shown.append((title, text)),
        clock=lambda: now_s,
    )
    game, calm = Surroundings(MONDAY_NOON, programs=frozenset({"game"})), Surroundings(MONDAY_NOON)
    for seen in (calm, game, game):
        watch.judge(seen)
    assert [title for title, _ in shown] == ["swarmnode has paused"] and shown[0][1].startswith(
        "Reason: game is running."
    )
    now_s = 2 * CALM_S
    for _ in range(2):
        watch.judge(calm)
    assert [title for title, _ in shown[1:]] == ["swarmnode lends again"]
    lending.pause("a holiday")
    watch.judge(game)
    now_s = 4 * CALM_S
    watch.judge(calm)
    assert len(shown) == 2


async def test_a_desktop_shows_notices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each one in place of the one before, over a real session bus."""
    with session_bus(tmp_path, monkeypatch) as desktop:
        notices = DesktopNotices()
        notices.show("swarmnode has paused", "R&D <game> is running.")
        notices.show("swarmnode lends again", "Its rules allow it now.")
        await notices.idle()
        assert desktop.notices == [
            Notice(0, "swarmnode has paused", "R&amp;D &lt;game&gt; is running."),
            Notice(1, "swarmnode lends again", "Its rules allow it now."),
        ]
        await notices.close()


async def test_without_a_desktop_nothing_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No bus, a bus that is gone, and no program to reach one: each is passed over; a program that hangs is given up."""
    asked = list[tuple[str, float]]()

    def run(command: list[str], *, timeout: float, **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append((command[0], timeout))
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.delenv(SESSION_BUS, raising=False)
    unasked = DesktopNotices(run)
    unasked.show("title", "text")
    await unasked.idle()
    assert not asked
    monkeypatch.setenv(SESSION_BUS, f"unix:path={tmp_path / 'none'}")
    for notices in (unasked, DesktopNotices()):
        notices.show("title", "text")
        await notices.idle()
        await notices.close()
    assert [name for name, _ in asked] == ["busctl", "notify-send"] and all(timeout <= 2 for _, timeout in asked)


def test_what_is_seen_of_this_machine() -> None:
    """Only what the rules ask for; a program that runs is seen at the first look."""
    nothing = Lookout()(Rules())
    assert (nothing.idle_s, nothing.others_load, nothing.programs, nothing.memory_pressure) == (
        None,
        None,
        frozenset(),
        None,
    )
    with subprocess.Popen(["sleep", "60"]) as program:
        try:
            seen = Lookout()(Rules(exclusive=frozenset({"sleep"}), max_others_load=0.5, only_idle_s=1))
        finally:
            program.kill()
    assert "sleep" in seen.programs and (seen.others_load is None or 0 <= seen.others_load <= 1)
    assert seen.idle_s is None or seen.idle_s >= 0


def test_others_use_no_more_than_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's idle time may count back a little, and sums are rounded."""
    monkeypatch.setattr(psutil, "cpu_times", lambda: CpuTimes(user=100.0, idle=50.0))
    lookout = Lookout()
    monkeypatch.setattr(psutil, "cpu_times", lambda: CpuTimes(user=200.0, idle=49.0))
    assert lookout(Rules(max_others_load=0.5)).others_load == 1.0


def test_pressure_as_the_kernel_tells_it(tmp_path: Path) -> None:
    file = tmp_path / "memory"
    file.write_text("some avg10=12.50 avg60=1.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    assert memory_pressure(file) == 0.125
    file.write_text("nonsense\n")
    assert memory_pressure(file) is None and memory_pressure(tmp_path / "none") is None


def test_idleness_as_logind_tells_it() -> None:
    def told(text: str) -> Any:
        return lambda *_args, **_options: subprocess.CompletedProcess([], 0, text)

    assert logind_idle_since(told("IdleHint=yes\nIdleSinceHint=1700000000000000\n")) == 1.7e9
    assert abs((logind_idle_since(told("IdleHint=no\nIdleSinceHint=0\n")) or 0) - time.time()) < 60
    assert logind_idle_since(told("")) is None

    def missing(*_args: Any, **_options: Any) -> Any:
        raise FileNotFoundError("loginctl")

    assert logind_idle_since(missing) is None


@pytest.mark.parametrize(("told", "metered"), [("u 1\n", True), ("u 4\n", False), ("u 0\n", None), ("", None)])
def test_a_metered_connection_as_network_manager_tells_it(told: str, metered: bool | None) -> None:
    assert is_metered(lambda *_args, **_options: subprocess.CompletedProcess([], 0, told)) is metered
