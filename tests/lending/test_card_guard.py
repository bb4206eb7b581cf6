"""A card's ceilings, with a driver that says what a test wants."""

from __future__ import annotations

import asyncio
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from swarmnode.lending import cards as cards_module
from swarmnode.lending.cards import LEAST_SHARE, CardGuard, CardLimits, Cards, next_share


class NvmlError(Exception):
    """What the driver answers where it does not know."""


class NothingNew(NvmlError):
    """No sample since the time that was named."""


def driver(**figures: Any) -> SimpleNamespace:
    """A machine with two cards; the second tells no power."""

    def power(card: int) -> int:
        if card == 1:
            raise NvmlError
        return 150_000

    programs = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=8 << 30),
        SimpleNamespace(pid=1, usedGpuMemory=3 << 30),
        SimpleNamespace(pid=2, usedGpuMemory=None),
    ]
    told = {
        "NVMLError": NvmlError,
        "NVMLError_NotFound": NothingNew,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetTemperature": lambda card, _sensor: 60 + card,
        "nvmlDeviceGetPowerUsage": power,
        "nvmlDeviceGetComputeRunningProcesses": lambda card: programs if card else [],
        "nvmlDeviceGetGraphicsRunningProcesses": lambda card: programs[1:2] if card else [],
    }
    return SimpleNamespace(**{**told, **figures})


def test_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    cards = Cards()
    assert (cards.celsius(), cards.watts(), cards.others_bytes()) == (61, 150, 3 << 30)


def test_what_others_compute_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are asked for once, this program's own do not count, and a card that tells nothing is held against nobody."""
    samples = [
        SimpleNamespace(pid=pid, timeStamp=time_us, smUtil=percent)
        for pid, time_us, percent in ((os.getpid(), 1000, 90), (1, 1000, 20), (1, 2000, 40), (2, 2000, 5))
    ]

    def used(card: int, since_us: int) -> list[SimpleNamespace]:
        if card == 1:
            raise NvmlError
        if not (new := [sample for sample in samples if sample.timeStamp > since_us]):
            raise NothingNew
        return new

    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlDeviceGetProcessUtilization=used))
    cards = Cards()
    assert cards.others_load() == pytest.approx(0.35)
    assert cards.others_load() == 0.0
    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlDeviceGetProcessUtilization=lambda *_: used(1, 0)))
    assert Cards().others_load() is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NvmlError

    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlInit=missing))
    cards = Cards()
    assert (cards.celsius(), cards.watts(), cards.others_bytes()) == (None, None, None)
    assert CardLimits(max_celsius=80).strain(None, None) == 0


def test_a_card_that_warms_settles_below_its_ceiling() -> None:
    """In a minute, from 95 degrees at full duty over 30 at rest; the share follows, and none is taken that is not lent."""
    paced = SimpleNamespace(share=0.9)
    guard = CardGuard(CardLimits(max_celsius=80), [paced], Cards)
    celsius, seen = 30.0, []
    for _ in range(600):
        celsius += 0.1 * (30 + 72 * paced.share - celsius)  # as warm as its duty makes it, after some seconds
        guard.judge(celsius, None)
        seen.append(celsius)
    assert max(seen) < 86 and all(70 < each <= 81 for each in seen[-200:]) and LEAST_SHARE < paced.share <= 0.9


async def test_a_ceiling_may_come_change_and_go_while_the_guard_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards_module, "LOOK_S", 0.001)
    paced, sensors = SimpleNamespace(share=0.9), SimpleNamespace(celsius=lambda: 75.0, watts=lambda: None)
    guard = CardGuard.start(CardLimits(), [paced], lambda: sensors, on_crash=None)
    await asyncio.sleep(0.02)
    assert paced.share == 0.9
    for limits, slows in (
        (CardLimits(max_celsius=70), True),
        (CardLimits(max_celsius=90), False),
        (CardLimits(), False),
    ):
        guard.follow(limits)
        for _ in range(500):
            await asyncio.sleep(0.002)
            if (paced.share < 0.1) if slows else (paced.share == 0.9):
                break
        assert (paced.share < 0.1) == slows
    await guard.close()


def test_both_ceilings_hold_and_the_least_share_is_the_end() -> None:
    limits = CardLimits(max_celsius=80, max_watts=200)
    assert limits.strain(60, 250) == 1.25 and limits.strain(90, None) == 1.125
    share = 1.0
    for _ in range(100):
        share = next_share(share, 1.0, 1.2)
    assert share == pytest.approx(LEAST_SHARE, rel=0.01)
    assert next_share(0.02, 0.02, 1.2) == 0.02 and next_share(0.5, 0.5, 0.1) == 0.5
