"""What sessions want computed, on the device's executor: nobody waits for what will never come."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmnode.codec.sampling import Grammar, GrammarKind, Sampling
from swarmnode.codec.tensors import LARGEST_VALUE, Codec, DType, TensorInfo
from swarmnode.compress.codecs import decode, encode_in_place
from swarmnode.compute.executor import Executor
from swarmnode.compute.serving.runner import StepInput
from swarmnode.compute.serving.runner import StepOutput as Output
from swarmnode.compute.serving.sampler import Sampler
from swarmnode.errors import ErrorCode, ProtocolError
from swarmnode.plan.compression import CodecSchedule
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Sample
from swarmnode.serving.worker import DRAWING_THREADS, Worker
from swarmnode.swarm.records.manifest import SERVING_CODECS

PATIENCE_S = 120.0


class EchoRunner:
    """Stands in for `StageRunner`: hidden states are the ids. `act` comes before each pass."""

    def __init__(self) -> None:
        self.span: Any = SimpleNamespace(
            start=0,
            end=2,
            vocab_size=100,
            device=torch.device("cpu"),
            dtype=torch.float32,
            has_exact_products=False,
        )
        self.captured_works = None
        self.act: Callable[[Sequence[StepInput]], object] = lambda _works: None
        self.opened: set[object] = set(range(10))
        self.fails: dict[object, Exception] = {}

    def open(self, session: object, **_reservation: object) -> None:
        self.opened.add(session)

    def close(self, session: object) -> None:
        self.opened.discard(session)

    def units(self, _session: object) -> int:
        return 2

    def __contains__(self, session: object) -> bool:
        return session in self.opened

    def run_each(self, works: Sequence[StepInput]) -> list[Output | Exception]:
        self.act(works)
        return [self._run(work) for work in works]

    def _run(self, work: StepInput) -> Output | Exception:
        return self.fails.get(work.session_id) or Output(work.session_id, 0, work.x[..., None].float())


class Desk:
    """A worker on an executor, and what came of its jobs."""

    def __init__(self) -> None:
        self.executor = Executor()
        self.runner = EchoRunner()
        self.worker = Worker(self.runner, self.executor, longest_chunk_tokens=128)  # type: ignore[arg-type]
        self.results: asyncio.Queue[tuple[int, JobResult]] = asyncio.Queue()

    async def start(self) -> Desk:
        await self.worker.start()
        return self

    def submit(self, session: int, *ids: int, sampler: Sampler | None = None) -> None:
        info = TensorInfo(Codec.NONE, DType.INT64, (1, len(ids)))
        payload = struct.pack(f"<{len(ids)}q", *ids)
        then = Sample(sampler, len(ids)) if sampler else ForwardHidden(CodecSchedule(Codec.NONE))
        now_s = self.worker.clock()
        self.worker.submit(Job(session, 0, len(ids), ((info, payload),), then, self._done, now_s))

    def submit_states(self, session: int, info: TensorInfo, payload: bytes) -> None:
        then, now_s = ForwardHidden(CodecSchedule(Codec.NONE)), self.worker.clock()
        self.worker.submit(Job(session, 0, info.shape[1], ((info, payload),), then, self._done, now_s))

    def _done(self, job: Job, result: JobResult, _run: object) -> None:
        self.results.put_nowait((job.session, result))

    async def next(self, count: int) -> dict[int, JobResult]:
        return dict([await asyncio.wait_for(self.results.get(), PATIENCE_S) for _ in range(count)])


@pytest.fixture
async def desk() -> Any:
    desk = await Desk().start()
    yield desk
    await desk.worker.close()
    await desk.executor.close()


async def test_steps_that_wait_go_together_and_prompts_alone(desk: Desk) -> None:
    go, passes = threading.Event(), []
    desk.runner.act = lambda works: passes.append([work.session_id for work in works])
    held = desk.worker.call("wait", go.wait)
    for session in range(3):
        desk.submit(session, session, session)
    desk.submit(7, *range(20))
    go.set()
    await held
    assert {session: result.error for session, result in (await desk.next(4)).items()} == dict.fromkeys((0, 1, 2, 7))
    assert passes[0] == [0, 1, 2] and all(others == [7] for others in passes[1:])


async def test_a_long_prompt_goes_in_chunks_and_comes_out_whole(desk: Desk) -> None:
    lengths: list[int] = []
    desk.runner.act = lambda works: lengths.extend(work.count for work in works)
    desk.submit(0, *(number % 100 for number in range(300)))
    values: list[float] = []
    while len(values) < 300:
        result = (await desk.next(1))[0]
        ((info, payload),) = result.tensors
        values += struct.unpack(f"<{info.shape[1]}f", payload)
    assert values == [number % 100 for number in range(300)]
    assert lengths == [128, 128, 44]


class HeldMatcher:
    """Stands in for `GrammarMatcher`: what may follow is known once it is let go, or not at all."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        self.at_once, self.most_at_once = 0, 0

    def allowed(self, _text: Sequence[int]) -> torch.Tensor:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.go.wait(PATIENCE_S)
        self.at_once -= 1
        if self.error is not None:
            raise self.error
        return torch.tensor([True])

    def ends(self, _text: Sequence[int]) -> bool:
        return False

    def sampler(self) -> Sampler:
        wants = Sampling(prompt_length=1, max_new_tokens=9, grammar=Grammar(GrammarKind.LARK, "start: x"))
        return Sampler(wants, 10, self)  # type: ignore[arg-type]


async def test_a_grammar_that_takes_long_holds_up_nobody_else(desk: Desk) -> None:
    slow, passes = HeldMatcher(), []
    desk.runner.act = lambda works: passes.append([work.session_id for work in works])
    go = threading.Event()
    held = desk.worker.call("wait", go.wait)
    desk.submit(0, 5, sampler=slow.sampler())
    desk.submit(1, 6)
    go.set()
    await held
    assert set(await desk.next(1)) == {1} and passes == [[0, 1]], "they were in one pass"
    for _ in range(3):
        desk.submit(1, 7)
        assert set(await desk.next(1)) == {1}
    slow.go.set()
    (drawn,) = (await desk.next(1))[0].tokens
    assert (drawn.position, drawn.ids) == (1, (0,))


async def test_a_grammar_that_cannot_go_on_fails_its_session_alone(desk: Desk) -> None:
    failing = HeldMatcher()
    failing.error = ProtocolError("nothing may follow", code=ErrorCode.INVALID_REQUEST)
    failing.go.set()
    desk.submit(0, 5, sampler=failing.sampler())
    desk.submit(1, 6)
    results = await desk.next(2)
    assert (results[0].error, results[1].error) == (ErrorCode.INVALID_REQUEST, None)


async def test_who_leaves_waits_for_no_grammar(desk: Desk) -> None:
    slow = HeldMatcher()
    for session in range(DRAWING_THREADS + 1):
        desk.submit(session, 5, sampler=slow.sampler())
    desk.submit(9, 6)
    assert set(await desk.next(1)) == {9}
    await asyncio.wait_for(desk.worker.close(), PATIENCE_S)
    assert (await desk.next(1))[DRAWING_THREADS].error == ErrorCode.INTERNAL, "its draw had not begun"
    slow.go.set()


async def test_the_tokens_of_a_session_are_drawn_one_after_another(desk: Desk) -> None:
    """With guesses in flight a session has several draws by a grammar at once, each of which depends on the one before."""
    slow, all_wait = HeldMatcher(), asyncio.Event()
    sampler, draw = slow.sampler(), desk.worker._draw

    def drawing(*asked: Any) -> None:
        draw(*asked)
        if len(desk.worker._draws[1]) > DRAWING_THREADS:
            all_wait.set()

    desk.worker._draw = drawing  # type: ignore[assignment, method-assign]
    for _ in range(DRAWING_THREADS + 1):
        desk.submit(1, 5, sampler=sampler)

    await asyncio.wait_for(all_wait.wait(), PATIENCE_S)
    slow.go.set()
    assert set(await desk.next(DRAWING_THREADS + 1)) == {1} and not desk.worker._draws
    assert slow.most_at_once == 1


async def test_guesses_that_are_taken_back_are_dropped_before_they_are_computed(desk: Desk) -> None:
    go, passes = threading.Event(), list[tuple[int, int]]()
    desk.runner.act = lambda works: passes.extend((work.start or 0, work.count) for work in works)
    held = desk.worker.call("wait", go.wait)
    for start, count, back_to in ((0, 3, None), (3, 4, None), (7, 4, None), (5, 2, 5)):
        info = TensorInfo(Codec.NONE, DType.INT64, (1, count))
        then, now_s = ForwardHidden(CodecSchedule(Codec.NONE)), desk.worker.clock()
        parts = ((info, struct.pack(f"<{count}q", *range(start, start + count))),)
        desk.worker.submit(Job(2, start, count, parts, then, desk._done, now_s, back_to=back_to))
    go.set()
    await held
    await desk.next(2)
    assert passes == [(0, 5), (5, 2)]
    assert desk.worker.queued == 0 and not desk.worker.scheduler._backlogs


async def test_a_bad_id_fails_alone(desk: Desk) -> None:
    go = threading.Event()
    held = desk.worker.call("wait", go.wait)
    desk.submit(0, 5)
    desk.submit(1, 100)
    go.set()
    await held
    results = await desk.next(2)
    assert results[0].error is None
    assert results[1].error == ErrorCode.INVALID_REQUEST and results[1].bad_input


async def test_who_fails_in_a_pass_fails_alone(desk: Desk) -> None:
    go = threading.Event()
    desk.runner.fails = {1: IndexError("beyond the table")}
    desk.runner.opened.remove(2)
    held = desk.worker.call("wait", go.wait)
    for session in range(4):
        desk.submit(session, session)
    go.set()
    await held
    errors = {session: result.error for session, result in (await desk.next(4)).items()}
    assert errors == {0: None, 1: ErrorCode.INTERNAL, 2: ErrorCode.INTERNAL, 3: None}
    assert not desk.executor.died.done()


def fault() -> None:
    raise RuntimeError("CUDA error: device-side assert triggered")


def leave() -> None:
    raise SystemExit(1)


@pytest.mark.parametrize("how", [fault, leave])
async def test_sessions_hear_at_once_of_a_device_that_is_lost(desk: Desk, how: Callable[[], None]) -> None:
    go = threading.Event()
    held = desk.worker.call("wait", go.wait)
    desk.runner.act = lambda _works: how()
    for session in range(3):
        desk.submit(session, session)
    desk.submit(3, 1, 2)
    go.set()
    await held
    assert {result.error for result in (await desk.next(4)).values()} == {ErrorCode.INTERNAL}
    assert await asyncio.wait_for(desk.executor.died, PATIENCE_S)
    desk.submit(9, 1)
    assert (await desk.next(1))[9].error == ErrorCode.INTERNAL


async def test_what_can_not_be_opened_costs_nobody_else(desk: Desk) -> None:
    desk.runner.open = lambda *_, **__: 1 // 0  # type: ignore[method-assign, assignment]
    desk.worker.open(1, rows=1)
    desk.submit(0, 5)
    assert (await desk.next(1))[0].error is None


POSITIONS, WIDTH = 2, 128
HOSTILE = {
    "nothing": lambda payload: b"",
    "half": lambda payload: payload[: len(payload) // 2],
    "a byte less": lambda payload: payload[:-1],
    "a byte more": lambda payload: payload + b"\0",
    "twice": lambda payload: payload * 2,
    "ones": lambda payload: b"\xff" * len(payload),  # NaN in floats and scales
    "infinite": lambda payload: b"\x80\x7f" * (len(payload) // 2),  # infinity as bfloat16
    "out of reason": lambda payload: b"\x00\x7f" * (len(payload) // 2),  # 1.7e38 as bfloat16
}


@pytest.mark.parametrize("codec", [*SERVING_CODECS, Codec.TOPK])
@pytest.mark.parametrize("way", HOSTILE)
async def test_states_that_are_damaged_or_out_of_reason_are_their_senders_fault(
    desk: Desk, codec: Codec, way: str
) -> None:
    """Whatever a neighbour sends: its own session ends with the sender's fault, and those that are computed with it go on."""
    go = threading.Event()
    states_BTH = torch.linspace(-3, 3, POSITIONS * WIDTH).reshape(1, POSITIONS, WIDTH)
    info, payload_M = encode_in_place(states_BTH, Codec(codec))
    payload = payload_M.numpy().tobytes()
    hostile = HOSTILE[way](payload)
    held = desk.worker.call("wait", go.wait)
    desk.submit_states(0, info, payload)
    desk.submit_states(1, info, hostile)
    desk.submit(2, 4)
    go.set()
    await held
    results = await desk.next(3)
    assert results[0].error is None and results[2].error is None
    if results[1].error is None:  # some bytes are numbers within reason in some codecs
        sound = decode(info, hostile).float().abs().max()
        assert len(hostile) == len(payload) and sound <= LARGEST_VALUE
    else:
        assert results[1].bad_input and results[1].error in (
            ErrorCode.MALFORMED,
            ErrorCode.NOT_FINITE,
            ErrorCode.TOO_LARGE,
        )
