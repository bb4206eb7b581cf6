"""Keeps a card below a temperature and a power that its owner set: the node rests more before the card has to slow down."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarmnode.net.tasks import OnCrash, Tasks

LOOK_S = 1.0
LEAST_SHARE = 0.05
DOWN, UP = 0.8, 1.05  # down at once, up slowly: a card stays warm for a while
ROOM = 0.97  # of a ceiling, above which nothing goes up


@dataclass(frozen=True)
class CardLimits:
    """Ceilings of a card. None: none."""

    max_celsius: float | None = None
    max_watts: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is a ceiling at all."""
        return self != CardLimits()

    def strain(self, celsius: float | None, watts: float | None) -> float:
        """How near the card is to its ceilings: 1 at one of them. What is not known strains nobody."""
        pairs = (celsius, self.max_celsius), (watts, self.max_watts)
        return max((now / most for now, most in pairs if now is not None and most is not None), default=0.0)


class Paced(Protocol):
    """What can be made to rest: `share` is of the time, 0 to 1."""

    share: float


class Sensors(Protocol):
    """What tells how hot a card is and what it draws; None where that is not known."""

    def celsius(self) -> float | None:
        """Of the hottest card."""

    def watts(self) -> float | None:
        """Of the one that draws most."""


def next_share(share: float, most: float, strain: float) -> float:
    """The share of the time that a device may be busy next, where it had `share` and its owner lends `most`."""
    if strain > 1:
        return max(min(LEAST_SHARE, most), share * DOWN)
    return min(most, share * UP) if strain < ROOM else share


class CardGuard:
    """Looks at the cards again and again, from `start` to `close`. `paced` is what rests: all of them for the hottest."""

    def __init__(
        self,
        limits: CardLimits,
        paced: Sequence[Paced],
        sensors: Callable[[], Sensors],
        *,
        on_crash: OnCrash | None = None,
    ) -> None:
        self._limits = limits
        self._paced = paced
        self._most = paced[0].share
        self._sensors = sensors
        self._tasks = Tasks("card guard", on_crash=on_crash)

    def __repr__(self) -> str:
        return f"<CardGuard of {self._limits}, at {self._paced[0].share:.0%} of {self._most:.0%}>"

    @classmethod
    def start(
        cls, limits: CardLimits, paced: Sequence[Paced], sensors: Callable[[], Sensors], *, on_crash: OnCrash | None
    ) -> CardGuard:
        """One that watches from now on, where there is a ceiling."""
        guard = cls(limits, paced, sensors, on_crash=on_crash)
        if limits.any:
            guard._tasks.spawn(guard._watch(), "watch")
        return guard

    async def close(self) -> None:
        """Stop."""
        await self._tasks.close()

    async def _watch(self) -> None:
        sensors = await asyncio.to_thread(self._sensors)
        while True:
            celsius, watts = await asyncio.to_thread(lambda: (sensors.celsius(), sensors.watts()))
            self.judge(celsius, watts)
            await asyncio.sleep(LOOK_S)

    def judge(self, celsius: float | None, watts: float | None) -> None:
        """Let the devices rest as much as what was seen asks for."""
        share = next_share(self._paced[0].share, self._most, self._limits.strain(celsius, watts))
        for paced in self._paced:
            paced.share = share
