"""How long the task that runs may wait for something."""

from __future__ import annotations

import asyncio


class TimeLimit:
    """`with TimeLimit(seconds):` raises asyncio.TimeoutError where what is awaited inside takes longer. A timer is all that it
    costs; `wait_for` costs a task, and two turns of the loop. (`asyncio.timeout`, which Python 3.10 does not have.)"""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

    def __repr__(self) -> str:
        return f"<TimeLimit of {self._seconds} s{', which are over' * self._is_over}>"

    def __enter__(self) -> TimeLimit:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)
        return self

    def _end(self) -> None:
        assert self._task is not None
        self._is_over = self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._timer.cancel()
        if self._is_over and kind is asyncio.CancelledError:
            raise asyncio.TimeoutError from None
