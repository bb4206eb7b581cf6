"""Worker: positions of many sessions, joined to batches, computed on one device and encoded; and the watch over a
stalled device.

    loop:    submit(job) ------.                             .----> job.done(result)
    thread:                   put -> take -> decode -> run -> encode

The thread is the device's executor (`compute/executor.py`). It handles all tensors: payloads are decoded, sampled and
encoded there, never on the event loop. Tokens that a grammar allows are found on other threads, so no other session waits
for them. `plan/serving/scheduler.py` decides which sessions share a pass and how much of a prompt goes into it; jobs are
joined and cut accordingly (`job.py`).
"""

from __future__ import annotations

import asyncio
import logging
import operator
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from swarmnode.codec.tensors import PLAIN_CODECS, Codec, TensorInfo, payload_bytes
from swarmnode.compress.codecs import to_buffer
from swarmnode.compute.capacity.capacity import PREFILL_POSITIONS, Speeds
from swarmnode.compute.executor import Executor, Urgency, WorkItem, is_device_fault
from swarmnode.compute.serving.cohort import LONGEST_SHARED
from swarmnode.compute.serving.device_transfers import Check, DeviceInputs, DeviceOutputs
from swarmnode.compute.serving.mtp_guesses import DrawnStates, MtpGuesses
from swarmnode.compute.serving.runner import WANT_ALL, WANT_LAST, WANT_NOTHING, StepInput
from swarmnode.compute.serving.runner import StepOutput as Output
from swarmnode.compute.serving.sampler import Drawn
from swarmnode.compute.stopwatch import Stopwatch
from swarmnode.config import ServerConfig
from swarmnode.errors import ErrorCode, LocalError, ProtocolError
from swarmnode.measuring.meters import DECODE, FORWARD, PREFILL, SERVE, StageMeter
from swarmnode.net.clock import Deadline, Expectation
from swarmnode.plan.serving.draft_budget import RowLoad
from swarmnode.plan.serving.scheduler import SHORTEST_CHUNK, PassScheduler
from swarmnode.plan.view import Span
from swarmnode.serving.job import ForwardHidden, Job, JobResult, Pass, Sample, drop_from, next_job

if TYPE_CHECKING:
    from swarmnode.compute.serving.runner import StageRunner

log = logging.getLogger(__name__)

T = TypeVar("T")

DRAWING_THREADS = 2  # for grammars: a slow grammar delays few others
STALLED = Deadline(floor_s=3.0, ceiling_s=30.0, slack=4.0)  # of one pass; the ceiling if nothing was measured


Finish = Callable[[Sequence[Tensor]], JobResult]
"""Function from the tensors fetched to the host to the result of a job."""

OnPass = Callable[[str, int, int, int, float], None]
"""Callback after a successful pass, on the compute thread: (phase, sessions, positions and units of the first session,
seconds)."""

OnJobs = Callable[[Sequence[Job]], None]


class Running(NamedTuple):
    """Item on a compute thread: the seconds that it has run, and whether it is a pass of sessions."""

    seconds: float
    serving: bool


class ComputeWatch:
    """Watch over one stage. It is stalled if work waits and no pass has ended for far longer than passes take.

    A pass is expected to take as long as earlier ones of its kind did; for a prompt, per position.
    """

    def __init__(self, deadline: Deadline = STALLED) -> None:
        self._deadline = deadline
        # By session: the end of its waiting positions, and the positions of its longest job.
        self._waiting: dict[int, tuple[int, int]] = {}
        self._moved_at_s = 0.0
        # By whether a pass is a decode step.
        self._position_s: defaultdict[bool, Expectation] = defaultdict(Expectation)

    def expect(self, *, step_s: float, position_s: float) -> None:
        """Set the expected seconds of a decode step and of one prompt position, measured before the first session came."""
        self._position_s[True].record(step_s)
        self._position_s[False].record(position_s)

    @property
    def waiting(self) -> frozenset[int]:
        """Sessions whose positions wait to be computed."""
        return frozenset(self._waiting)

    def submitted(self, session: int, end: int, count: int, now_s: float) -> None:
        """Note that positions [end - count, end) of a session wait to be computed."""
        if not self._waiting:
            self._moved_at_s = now_s
        longest = self._waiting.get(session, (0, 0))[1]
        self._waiting[session] = (end, max(longest, count))

    def computed(self, session: int, end: int, count: int, took_s: float, now_s: float) -> None:
        """Note that a pass of `took_s` seconds brought a session to position `end`, with `count` new positions."""
        self._moved_at_s = now_s
        self._position_s[count == 1].record(took_s / count)
        if end >= self._waiting.get(session, (0, 0))[0]:
            self._waiting.pop(session, None)

    def forget(self, session: int) -> None:
        """Forget the waiting positions of a session that has ended."""
        self._waiting.pop(session, None)

    def stalled(self, now_s: float, running: Running | None) -> bool:
        """Return whether computing is stalled. `running` is the item on the thread, None if it is idle.

        If the thread does not run a pass of sessions, no time is expected of it and the deadline is at its ceiling.
        """
        if not self._waiting:
            return False
        waited_s, work_s = now_s - self._moved_at_s, None
        if running is not None:
            waited_s = min(waited_s, running.seconds)
            work_s = self._expected_s() if running.serving else None
        return waited_s > self._deadline.wait_s(rtt_s=0.0, work_s=work_s)

    def _expected_s(self) -> float | None:
        """Return the seconds that the longest waiting job should take; None if no pass of its kind was seen."""
        times_s: list[float] = []
        for _, count in self._waiting.values():
            position_s = self._position_s[count == 1].bound
            if position_s is None:
                return None
            times_s.append(position_s * count)
        return max(times_s)


class _Batch(WorkItem):
    """Jobs of several sessions that pass through the model together."""

    def __init__(self, jobs: Sequence[Job], run: OnJobs, give_up: OnJobs) -> None:
        owner = f"session {jobs[0].session}" if len(jobs) == 1 else f"{len(jobs)} sessions"
        super().__init__(jobs[0].phase, urgency=Urgency.FORWARD, owner=owner, size=sum(job.count for job in jobs))
        self._jobs = jobs
        self._run = run
        self._give_up = give_up

    def run(self) -> None:
        with torch.inference_mode():
            self._run(self._jobs)

    def abandon(self, error: Exception) -> None:
        self._give_up(self._jobs)


@dataclass(eq=False)
class Worker:
    """Source of work for a device's executor: the positions that sessions want computed on one span."""

    runner: StageRunner
    executor: Executor
    _: KW_ONLY
    mtp: MtpGuesses | None = None  # guesses of the layer beside the model's head, at the last hop
    longest_chunk_tokens: int = ServerConfig.longest_chunk_tokens

    def __post_init__(self) -> None:
        self.clock = self.executor.clock
        self.scheduler = PassScheduler(
            longest_step=LONGEST_SHARED,
            longest_chunk=self.longest_chunk_tokens,
            # Exact products of few rows cost as much for each as a step; of more rows, a third.
            least_beside=SHORTEST_CHUNK if self.runner.span.has_exact_products else 1,
        )
        self.row_load = RowLoad()
        self._stopwatch = Stopwatch(self.runner.span.device, clock=self.executor.clock)
        self._waiting: dict[int, deque[Job]] = {}
        self._draws: dict[int, deque[tuple[Job, Callable[[], JobResult], Pass]]] = {}  # in their order, by session
        self._drawing = ThreadPoolExecutor(DRAWING_THREADS, thread_name_prefix="swarmnode-drawing")
        self.positions = 0
        self.on_pass: OnPass = lambda _phase, _sessions, _positions, _units, _seconds: None
        self.meter = StageMeter(Span(self.runner.span.start, self.runner.span.end), SERVE)

    def __repr__(self) -> str:
        return f"<Worker {self.runner!r} after {self.positions} positions, {len(self._waiting)} sessions waiting>"

    @property
    def queued(self) -> int:
        """Number of waiting jobs."""
        return sum(len(jobs) for jobs in list(self._waiting.values()))

    @property
    def running(self) -> Running | None:
        """Item that the device computes at the moment, also for another source (training, say); None if it is idle."""
        item = self.executor.running
        return None if item is None else Running(self.executor.stalled_s, isinstance(item, _Batch))

    def expect(self, speeds: Speeds) -> None:
        """Set the expected cost of passes, until some have run."""
        for positions, units_per_s in ((1, speeds.decode_units_per_s), (PREFILL_POSITIONS, speeds.prefill_units_per_s)):
            if units_per_s:
                self.scheduler.ran(positions, positions * self.meter.span.units / units_per_s)

    async def start(self) -> None:
        """Join the executor's sources of work. Raises ExecutorDied if its thread has ended."""
        await self.executor.add(self)

    def submit(self, job: Job) -> None:
        """Queue a job. `job.done` is called on the loop for each pass over its positions, also if it fails, but not after
        `forget`. Jobs of a session that are computed as one call only the `done` of the first."""
        self.executor.submit(self, job)

    def call(self, kind: str, function: Callable[[], T], *, owner: str = "") -> asyncio.Future[T]:
        """Run a function on the compute thread, before the waiting jobs. The future raises ExecutorDied if the thread
        has ended."""
        return self.executor.call(Urgency.CONTROL, torch.inference_mode()(function), kind=kind, owner=owner)

    def open(self, session: int, *, owner: str = "", weight: float = 1.0, **reservation: Any) -> None:
        """Make room for a session (`StageRunner.open`) before any of its jobs is run. The caller has checked that it
        fits.

        If `owner` is not empty, the session's time counts for that owner, by `weight`.
        """

        def make_room() -> None:
            if owner:
                self.scheduler.open(session, owner, weight)
            self.runner.open(session, **reservation)

        self.call("open", make_room, owner=f"session {session}")

    def begin(self, session: int, copy: Callable[[], None]) -> None:
        """Begin the newly opened `session` by `copy`, which runs on the compute thread and gives it positions that were computed
        elsewhere. If it fails, the session is closed, and its first input fails."""

        def begin() -> None:
            try:
                copy()
            except Exception as error:
                if is_device_fault(error):
                    raise
                log.warning("session %d cannot begin with a copy: %s", session, error)
                self.runner.close(session)  # its first input then fails and reports it

        self.call("copy", begin, owner=f"session {session}")

    def extend(self, session: int, max_length: int) -> None:
        """Raise a session's number of positions to `max_length`. The caller has checked that they fit."""
        self.call("extend", lambda: self.runner.extend(session, max_length), owner=f"session {session}")

    def forget(self, session: int) -> None:
        """Drop the waiting jobs of a session and free its cache."""

        def drop() -> None:
            self._waiting.pop(session, None)
            self.scheduler.drop(session)
            self.runner.close(session)
            if self.mtp is not None:
                self.mtp.close(session)

        self.call("forget", drop, owner=f"session {session}")

    async def close(self) -> None:
        """Leave the executor after the pass that is running. Draws that have not begun come to nothing."""
        await self.executor.remove(self)
        for draws in self._draws.values():
            while len(draws) > 1:  # the first one is under way
                draws.pop()
        self._drawing.shutdown(wait=False, cancel_futures=True)

    def _draw(self, job: Job, finish: Callable[[], JobResult], run: Pass) -> None:
        """Let another thread draw the tokens by `finish` after the session's earlier draws, and deliver the result on the
        event loop."""
        draws = self._draws.setdefault(job.session, deque())
        draws.append((job, finish, run))
        if len(draws) == 1:
            self._draw_next(job.session)

    def _draw_next(self, session: int) -> None:
        draws = self._draws[session]
        job, finish, run = draws[0]

        def drawn(result: asyncio.Future[JobResult]) -> None:
            failed = result.cancelled() or result.exception() is not None
            _deliver([job], [JobResult(error=ErrorCode.INTERNAL) if failed else result.result()], run)
            draws.popleft()
            if draws:
                self._draw_next(session)
            else:
                del self._draws[session]

        asyncio.get_running_loop().run_in_executor(self._drawing, finish).add_done_callback(drawn)

    # -- below: the compute thread

    def put(self, item: Job) -> None:
        """Add a job of a session to those that wait for a pass. Waiting guesses that it takes back are dropped."""
        jobs = self._waiting.setdefault(item.session, deque())
        if item.back_to is not None and (dropped := drop_from(jobs, item.back_to)):
            self.scheduler.retract(item.session, dropped)
        jobs.append(item)
        self.scheduler.add(item.session, item.count, stages_after=item.stages_after)

    def next_item(self) -> WorkItem | None:
        """Return the next pass; None if no job waits."""
        jobs = [self._next_job(session, count) for session, count in self.scheduler.next().items()]
        if not jobs:
            return None
        self.scheduler.took({job.session: job.count for job in jobs})
        return _Batch(jobs, self._run, self._give_up)

    def _next_job(self, session: int, count: int) -> Job:
        jobs = self._waiting[session]
        job = next_job(jobs, count)
        if not jobs:
            del self._waiting[session]
        return job

    def abandon(self, items: Iterable[Job], error: Exception) -> None:
        """Fail `items` and all waiting jobs: nothing is computed any more."""
        self._give_up([*(job for jobs in self._waiting.values() for job in jobs), *items])
        self._waiting.clear()

    def _give_up(self, jobs: Sequence[Job]) -> None:
        """Return an INTERNAL error for these jobs, on the loop: this node is at fault."""
        now_s = self.clock()
        _deliver(jobs, [JobResult(error=ErrorCode.INTERNAL)] * len(jobs), Pass(now_s, now_s, len(jobs)))

    def _run(self, batch: Sequence[Job]) -> None:
        finishes, left = self._compute(batch)
        at_once = [job for job in batch if not job.draws_by_grammar]
        results = self._guess_ahead(at_once, [finishes[id(job)]() for job in at_once], left)
        run = Pass(self.executor.began_s, self.clock(), len(batch))
        self.executor.post(_deliver, at_once, results, run)  # first of all, as the next hop waits for it
        for job in batch:
            if job.draws_by_grammar:
                self.executor.post(self._draw, job, finishes[id(job)], run)
        positions = len(batch) * max(job.count for job in batch)
        self.scheduler.ran(positions, run.ended_s - run.began_s)
        self.row_load.record(run.ended_s, positions * self.scheduler.cost.position_s)
        unsound = {id(job) for job, result in zip(at_once, results, strict=True) if result.bad_input}
        for job in batch:
            if id(job) not in unsound:
                self.meter.record_hop(job.phase, run.ended_s - job.submitted_s)

    def _guess_ahead(
        self, jobs: Sequence[Job], results: Sequence[JobResult], left: Mapping[int, Tensor]
    ) -> list[JobResult]:
        """Return the results of jobs with the prediction layer's guesses behind the tokens that were drawn. `left` has the states
        (1, K, H) that left the last layer, by the job's id."""
        if self.mtp is None:
            return list(results)
        drawn = [
            _drawn(job, result.tokens, left[id(job)])
            for job, result in zip(jobs, results, strict=True)
            if id(job) in left and result.tokens and not result.tokens[-1].final
        ]
        guesses = self.mtp.guess(drawn)
        return [_with_guesses(result, guesses.get(job.session, ())) for job, result in zip(jobs, results, strict=True)]

    def _compute(self, batch: Sequence[Job]) -> tuple[dict[int, Callable[[], JobResult]], dict[int, Tensor]]:
        """Run a batch, and return the function that finishes each job, on any thread, by the job's id; and the states that left
        the last layer, for the jobs behind which the prediction layer may guess.

        All work on the device is launched first, and waited for only once.
        """
        inputs = DeviceInputs(self.runner.span.device, self.runner.span.dtype)
        outputs = DeviceOutputs(self.runner.captured_works)
        places = [[inputs.add(info, payload) for info, payload in job.parts] for job in batch]
        finishes: dict[int, Finish] = {}
        ready: list[Job] = []
        works: list[StepInput] = []
        sound: list[Check | None] = []
        for job, parts in zip(batch, places, strict=True):
            try:
                work = self._decode(job, [inputs.tensor(part) for part in parts])
                sound.append(outputs.add_finiteness(work.x) if work.x.is_floating_point() else None)
                works.append(work)
                ready.append(job)
            except ProtocolError as error:
                finishes[id(job)] = _returning(JobResult(error=error.code, bad_input=True))
            except Exception as error:
                finishes[id(job)] = _returning(_failure(job, error))
        outcomes = self._pass(ready, works) if works else []
        for job, flag, outcome in zip(ready, sound, outcomes, strict=True):
            finishes[id(job)] = self._leave(job, flag, outcome, outputs)
        self.positions += sum(job.count for job in ready)
        fetched = outputs.fetch()
        left = {
            id(job): outcome.left_BKH
            for job, outcome in zip(ready, outcomes, strict=True)
            if job.guesses_ahead and isinstance(outcome, Output) and outcome.left_BKH is not None
        }
        return {id(job): partial(_finished, job, finishes[id(job)], fetched) for job in batch}, left

    def _pass(self, jobs: Sequence[Job], works: Sequence[StepInput]) -> list[Output | Exception]:
        phase = DECODE if min(work.count for work in works) == 1 else PREFILL
        tokens = [work.x.shape[0] * work.count for work in works]
        units = [self.runner.units(work.session_id) for work in works]
        unit_tokens = sum(map(operator.mul, tokens, units))
        new_tokens = sum(count for job, count in zip(jobs, tokens, strict=True) if not job.handed_on)
        outcomes: list[Output | Exception] = []

        def record(pass_s: float) -> None:
            self.meter.record_pass(phase, pass_s, microbatches=len(works), tokens=new_tokens, unit_tokens=unit_tokens)
            if not isinstance(outcomes[0], Exception):
                self.on_pass(phase, len(works), works[0].count, units[0], pass_s)

        with self._stopwatch.timing(record):
            outcomes += self.runner.run_each(works)
        return outcomes

    def _leave(self, job: Job, sound: Check | None, outcome: Output | Exception, outputs: DeviceOutputs) -> Finish:
        """Launch the encoding of a job's outcome on the device, and return the function that completes it on the host.

        An error of this job affects no other job.
        """
        try:
            if isinstance(outcome, Exception):
                raise outcome
            finish = self._encode(job, outcome.output, outputs)
        except Exception as error:
            return _returning(_failure(job, error))
        if sound is None:
            return finish
        unsound = JobResult(error=ErrorCode.NOT_FINITE, bad_input=True)
        return lambda fetched: finish(fetched) if sound(fetched) else unsound

    def _decode(self, job: Job, tensors: list[Tensor]) -> StepInput:
        """Decode a job to the runner's input. The session has checked its shapes, so no payload can become larger than
        they say.

        Raises LocalError if the cache could not be opened, ProtocolError if a token id is not in the vocabulary.
        """
        if job.session not in self.runner:
            raise LocalError("the session's KV cache could not be opened; open the session again")
        x = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        x = x[:, job.skip : job.skip + job.count]
        if not x.is_floating_point() and (int(x.min()) < 0 or int(x.max()) >= self.runner.span.vocab_size):
            raise ProtocolError("a token id is not in the vocabulary", code=ErrorCode.INVALID_REQUEST)
        wanted = job.wanted
        want = WANT_NOTHING if wanted == 0 else WANT_LAST if wanted == 1 else WANT_ALL
        guessed = job.end - job.first_guessed
        return StepInput(job.session, x, want, job.reorder, job.start, job.cut_to, guessed)

    def _encode(self, job: Job, y: Tensor, outputs: DeviceOutputs) -> Finish:
        """Launch the encoding of `y`: hidden_BTH, or at the last hop logits_BKV (hidden_BTH if the client holds the
        head)."""
        then, wanted = job.then, job.wanted
        if isinstance(then, ForwardHidden):
            pieces = list(then.codecs.pieces(job.start, job.end))
            if job.guessed:
                pieces = [part for piece in pieces for part in _divisible(*piece)]
            states = [y if len(pieces) == 1 else y[:, start - job.start : end - job.start] for start, end, _ in pieces]
            infos, finish = _put(states, [codec for _, _, codec in pieces], outputs)
            for info, piece in zip(infos, states, strict=True):
                codec, encoded_bytes = Codec(info.codec), payload_bytes(info)
                self.meter.record_tensors(codec, FORWARD, raw_bytes=piece.nbytes, encoded_bytes=encoded_bytes)
            return finish
        if not wanted:
            return _returning(JobResult())
        y = y[:, y.shape[1] - wanted :]
        sound = outputs.add_finiteness(y)
        if isinstance(then, Sample):
            finish = self._sample(job, then, y, outputs)
        else:
            _, finish = _put([y], [Codec.NONE], outputs)
        return lambda fetched: finish(fetched) if sound(fetched) else JobResult(error=ErrorCode.NOT_FINITE)

    def _sample(self, job: Job, then: Sample, logits_BKV: Tensor, outputs: DeviceOutputs) -> Finish:
        first = job.end - job.wanted + 1  # logits at p draw the token at p + 1
        draw = then.sampler.launch(logits_BKV, first, outputs, job.guesses)
        return lambda fetched: JobResult(tokens=draw(fetched))


def _drawn(job: Job, tokens: Sequence[Drawn], left_BKH: Tensor) -> DrawnStates:
    """Return a job's positions whose tokens were drawn, one after another, with the states that left the last layer there."""
    start = tokens[0].position - 1
    first = start - (job.end - left_BKH.shape[1])
    ids = tuple(token.ids[0] for token in tokens)
    return DrawnStates(job.session, start, left_BKH[0, first : first + len(ids)], ids, guessed=job.guessed > 0)


def _with_guesses(result: JobResult, guesses: tuple[int, ...]) -> JobResult:
    """Return a result with guesses behind its last token."""
    if not guesses:
        return result
    *earlier, last = result.tokens
    return replace(result, tokens=(*earlier, last._replace(guesses=guesses)))


def _divisible(start: int, end: int, codec: Codec) -> Iterator[tuple[int, int, Codec]]:
    """Yield the positions in pieces that can be cut behind each position, as guesses may be; encoded as each alone."""
    step = end - start if codec in PLAIN_CODECS else 1
    for begin in range(start, end, step):
        yield begin, begin + step, codec


def _put(tensors: Sequence[Tensor], codecs: Sequence[Codec], outputs: DeviceOutputs) -> tuple[list[TensorInfo], Finish]:
    """Launch the encoding of tensors, each in its codec. Returns their descriptions and the function that completes
    them."""
    encoded = [outputs.add_encoded(tensor, codec) for tensor, codec in zip(tensors, codecs, strict=True)]

    def finish(fetched: Sequence[Tensor]) -> JobResult:
        return JobResult(tensors=tuple((info, to_buffer(payload_of(fetched))) for info, payload_of in encoded))

    return [info for info, _ in encoded], finish


@torch.inference_mode()
def _finished(job: Job, finish: Finish, fetched: Sequence[Tensor]) -> JobResult:
    try:
        return finish(fetched)
    except ProtocolError as error:  # the draw cannot do what the job asks for
        return JobResult(error=error.code)
    except Exception as error:
        return _failure(job, error)


def _returning(result: JobResult) -> Finish:
    """Return a function that returns `result`, which needs no outputs of the device."""
    return lambda _fetched: result


def _failure(job: Job, error: Exception) -> JobResult:
    """Log an error of this node and return the session's result. Raises the error if it is a fault of the device.

    NO_SESSION if the cache does not hold a position any more that the session goes back to: its client begins it anew.
    """
    if is_device_fault(error):
        raise error
    if isinstance(error, ProtocolError) and error.code == ErrorCode.NO_SESSION:
        return JobResult(error=ErrorCode.NO_SESSION)
    log.error("session %d failed at position %d", job.session, job.start, exc_info=error)
    return JobResult(error=ErrorCode.INTERNAL)


def _deliver(batch: Sequence[Job], results: Sequence[JobResult], run: Pass) -> None:
    for job, result in zip(batch, results, strict=True):
        job.done(job, result, run)
