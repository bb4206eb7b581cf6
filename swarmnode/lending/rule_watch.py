"""Holds a node to its rules: looks at the machine again and again, and pauses or resumes its lending."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from swarmnode.lending.lending import RULES, Lending
from swarmnode.lending.monthly_traffic import MonthlyTraffic
from swarmnode.lending.rules import Rules, Surroundings, reason_to_pause
from swarmnode.lending.surroundings import Lookout

LOOK_S = 1.0
CALM_S = 20.0  # for so long nothing must speak against lending before it goes on: a film has quiet moments


class RuleWatch:
    """`look` may block, and is called on a thread; `month_bytes` says what was sent and received this month."""

    def __init__(
        self,
        lending: Lending,
        look: Callable[[Rules], Surroundings],
        *,
        month_bytes: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lending = lending
        self._look = look
        self._month_bytes = month_bytes
        self._clock = clock
        self._broken_s: float | None = None  # when a rule last spoke against lending

    def __repr__(self) -> str:
        return f"<RuleWatch {self._lending.rules} of {self._lending!r}>"

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            if self._broken_s is None:
                await self._lending.ruled()
            self.judge(await asyncio.to_thread(self._look, self._lending.rules))
            await asyncio.sleep(LOOK_S)

    def judge(self, seen: Surroundings) -> None:
        """Act on what was seen: pause at once, resume after a calm while."""
        reason = reason_to_pause(self._lending.rules, replace(seen, month_bytes=self._month_bytes()))
        now_s = self._clock()
        if reason:
            self._broken_s = now_s
            self._lending.pause(reason, by=RULES)
        elif self._broken_s is not None and now_s - self._broken_s >= CALM_S:
            self._broken_s = None
            self._lending.resume(by=RULES)


async def follow_rules(
    lending: Lending, home: Path, moved: Callable[[], int], *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Let the rules of the time pause and resume a node, for ever. `moved` says how many bytes have gone over its links."""
    month = MonthlyTraffic(home, moved, first_day=lambda: lending.rules.month_day)
    try:
        await RuleWatch(lending, Lookout(), month_bytes=month, clock=clock).run()
    finally:
        month.keep()
