"""A thread beside a virtual loop: they take turns, so that transformers' `generate`, which blocks, may ask what is on the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Turns:
    """`run` calls a function in a thread while the loop stands still; where that function calls `ask`, it is the loop's turn."""

    def __init__(self) -> None:
        self._asked: queue.SimpleQueue[Coroutine[Any, Any, Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Future[Any]] = queue.SimpleQueue()

    def ask(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine on the loop; for the thread."""
        self._asked.put(coroutine)
        return self._answers.get().result()

    async def run(self, function: Callable[[], T]) -> T:
        """The result of the function; for the loop."""
        result: Future[T] = Future()

        def work() -> None:
            try:
                result.set_result(function())
            except BaseException as error:  # whatever it is, it is for who called
                result.set_exception(error)
            finally:
                self._asked.put(None)

        thread = threading.Thread(target=work)
        thread.start()
        while (coroutine := self._asked.get()) is not None:
            self._answers.put(await _settled(coroutine))
        thread.join()
        return result.result()


async def _settled(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    answer: Future[T] = Future()
    try:
        answer.set_result(await coroutine)
    except Exception as error:
        answer.set_exception(error)
    return answer
