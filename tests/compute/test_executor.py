"""The thread that computes: its order, and that nobody waits for it once it is gone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from swarmnode.compute.executor import Executor, Urgency, WorkItem, is_device_fault
from swarmnode.errors import ExecutorDied, WeightsLost


class AcceleratorError(RuntimeError):
    """As torch's: what every call answers after a failed assertion on a GPU."""


class Note(WorkItem):
    """Writes its name down."""

    def __init__(self, name: str, heard: list[str], act: Callable[[], object] = lambda: None) -> None:
        super().__init__("note", urgency=Urgency.FORWARD, owner=name)
        self.heard, self.act = heard, act
        self.abandoned: list[Exception] = []

    def run(self) -> None:
        self.act()
        self.heard.append(self.owner)

    def abandon(self, error: Exception) -> None:
        self.abandoned.append(error)


class Notes:
    """A source of notes, first come first served."""

    def __init__(self) -> None:
        self.waiting: list[Note] = []

    def put(self, item: Note) -> None:
        self.waiting.append(item)

    def next_item(self) -> Note | None:
        return self.waiting.pop(0) if self.waiting else None

    def abandon(self, items: Iterable[Note], error: Exception) -> None:
        for note in (*self.waiting, *items):
            note.abandon(error)
        self.waiting.clear()


@pytest.fixture
async def executor() -> Any:
    executor = Executor()
    yield executor
    await executor.close()


async def test_the_most_urgent_call_is_next_and_equals_keep_their_order(executor: Executor) -> None:
    go, ran = threading.Event(), []
    first = executor.call(Urgency.CONTROL, go.wait, kind="try")
    order = [Urgency.IDLE, Urgency.FORWARD, Urgency.BACKWARD, Urgency.FORWARD, Urgency.CONTROL, Urgency.BACKWARD]
    calls = [executor.call(urgency, lambda n=n: ran.append(n), kind="try") for n, urgency in enumerate(order)]
    go.set()
    await asyncio.gather(first, *calls)
    assert ran == [4, 2, 5, 1, 3, 0]


async def test_sources_take_turns_with_calls_and_idle_work_comes_last(executor: Executor) -> None:
    go, ran, notes = threading.Event(), [], Notes()
    await executor.add(notes)
    first = executor.call(Urgency.CONTROL, go.wait, kind="try")
    idle = executor.call(Urgency.IDLE, lambda: ran.append("idle"), kind="try")
    calls = [executor.call(Urgency.BACKWARD, lambda n=n: ran.append(f"call {n}"), kind="try") for n in range(2)]
    for n in range(3):
        executor.submit(notes, Note(f"note {n}", ran))
    control = executor.call(Urgency.CONTROL, lambda: ran.append("control"), kind="try")
    go.set()
    await asyncio.gather(first, idle, control, *calls)
    assert ran[0] == "control" and ran[-1] == "idle"
    assert [entry.split()[0] for entry in ran[1:5]] in (["call", "note"] * 2, ["note", "call"] * 2)


async def test_results_and_errors_come_back(executor: Executor) -> None:
    def fail() -> None:
        raise ValueError("no")

    assert await executor.call(Urgency.FORWARD, lambda: 7, kind="try") == 7
    with pytest.raises(ValueError, match="no"):
        await executor.call(Urgency.FORWARD, fail, kind="try")
    assert await executor.call(Urgency.FORWARD, threading.get_ident, kind="try") != threading.get_ident()
    assert not executor.died.done()


async def test_a_call_that_nobody_waits_for_is_not_run(executor: Executor) -> None:
    go, ran = threading.Event(), []
    first = executor.call(Urgency.CONTROL, go.wait, kind="try")
    dropped = executor.call(Urgency.FORWARD, lambda: ran.append("dropped"), kind="try")
    kept = executor.call(Urgency.FORWARD, lambda: ran.append("kept"), kind="try")
    dropped.cancel()
    go.set()
    await asyncio.gather(first, kept)
    assert ran == ["kept"]


async def test_it_says_what_it_is_at_and_for_how_long() -> None:
    now, go, begun = [0.0], threading.Event(), threading.Event()
    executor = Executor(clock=lambda: now[0])
    call = executor.call(Urgency.FORWARD, lambda: (begun.set(), go.wait()), kind="forward", owner="lease 7", size=64)
    await asyncio.to_thread(begun.wait)
    now[0] = 12.0
    assert executor.stalled_s == 12.0
    assert "forward of 64 for lease 7" in repr(executor) and "12.0 s" in repr(executor)
    go.set()
    await call
    await executor.call(Urgency.IDLE, lambda: None, kind="try")
    await executor.close()
    assert executor.stalled_s == 0.0 and executor.running is None


def fault() -> None:
    raise AcceleratorError("CUDA error: device-side assert triggered")


def leave() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("how", [fault, leave])
async def test_its_death_is_told_to_everybody_who_waits(executor: Executor, how: Callable[[], None]) -> None:
    go, notes = threading.Event(), Notes()
    await executor.add(notes)
    first = executor.call(Urgency.CONTROL, go.wait, kind="try")
    fatal = executor.call(Urgency.FORWARD, how, kind="forward", owner="lease 7")
    waiting = executor.call(Urgency.IDLE, lambda: 1, kind="try")
    note = Note("waits", [])
    executor.submit(notes, note)
    notes.next_item = lambda: None  # type: ignore[method-assign]
    go.set()
    await first
    error = await executor.died
    assert isinstance(error, ExecutorDied) and "<Call forward for lease 7, FORWARD>" in str(error)
    for call in (fatal, waiting, executor.call(Urgency.CONTROL, lambda: 2, kind="try")):
        with pytest.raises(ExecutorDied):
            await call
    late = Note("late", [])
    executor.submit(notes, late)
    await asyncio.sleep(0)
    assert len(note.abandoned) == len(late.abandoned) == 1


async def test_lost_weights_are_told_in_a_sentence(executor: Executor, caplog: pytest.LogCaptureFixture) -> None:
    def lose() -> None:
        raise WeightsLost("m.gguf was changed")

    with pytest.raises(ExecutorDied):
        await executor.call(Urgency.FORWARD, lose, kind="forward")
    assert str(await executor.died) == "m.gguf was changed" and not caplog.records


async def test_an_error_in_the_scheduling_is_its_death_too(executor: Executor) -> None:
    notes = Notes()
    await executor.add(notes)
    notes.put = lambda item: 1 // 0  # type: ignore[method-assign, assignment]
    note = Note("waits", [])
    executor.submit(notes, note)
    assert "ZeroDivisionError" in str(await executor.died)
    assert len(note.abandoned) == 1


async def test_what_waits_when_it_is_closed_is_abandoned() -> None:
    executor, begun, go, ran = Executor(), threading.Event(), threading.Event(), []
    running = executor.call(Urgency.CONTROL, lambda: (begun.set(), go.wait(), ran.append("running")), kind="try")
    await asyncio.to_thread(begun.wait)
    waiting = executor.call(Urgency.FORWARD, lambda: ran.append("waiting"), kind="try")
    closing = asyncio.ensure_future(executor.close())
    await asyncio.sleep(0)
    go.set()
    await closing
    await running
    with pytest.raises(ExecutorDied, match="leaving"):
        await waiting
    assert ran == ["running"] and not executor.died.done()
    await executor.close()


async def test_a_thread_that_hangs_is_left_behind() -> None:
    executor, go = Executor(), threading.Event()
    call = executor.call(Urgency.FORWARD, go.wait, kind="try")
    await executor.close(timeout_s=0.01)
    with pytest.raises(ExecutorDied):
        await call
    go.set()


def test_faults_of_a_device_are_known_from_others() -> None:
    assert is_device_fault(AcceleratorError("any"))
    assert is_device_fault(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_device_fault(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_device_fault(MemoryError())


async def test_what_nobody_waits_for_any_more_is_dropped_quietly(executor: Executor) -> None:
    go = threading.Event()
    held = [executor.call(Urgency.CONTROL, act, kind="act") for act in (go.wait, lambda: 1 // 0)]
    for future in held:
        future.cancel()
    go.set()
    assert await executor.call(Urgency.CONTROL, lambda: 7, kind="act") == 7
    assert all(future.cancelled() for future in held) and not executor.died.done()


def test_what_comes_after_the_loop_has_closed_is_dropped() -> None:
    async def make() -> Executor:
        executor = Executor()
        await executor.close()
        return executor

    executor, called = asyncio.run(make()), []
    executor.post(called.append, 1)
    assert not called
