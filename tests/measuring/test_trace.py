"""Traces: what hops remember of a session, who is told, and that a slow hop or link is found by them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.measuring_messages import MAX_TRACE_STEPS, MAX_TRACE_US, GetTrace, Trace, TraceStep, trace_id
from swarmnode.codec.messages import End, Error
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.links.switchboard import Switchboard
from swarmnode.measuring.trace import TRACE_PROTOCOL, Late, SessionTrace, Timeline, TimelinePart, fetch_traces
from swarmnode.net.fair_share import Recent
from swarmnode.net.interfaces import PeerId
from swarmnode.net.memory.medium import Path
from swarmnode.peer.questions import ask
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import ToyPeer
from tests.peer.toy_swarm import HELLO, ToySwarm, link_config

PROMPT = [5, 17, 3, 99, 42]
TOKENS = 20
STEP_US, LATENCY_US = 10_000, 10_000  # of the toy swarm


async def traced(swarm: ToySwarm, session: str) -> dict[PeerId, Trace]:
    peers = [one.peer for one in swarm.volunteers]
    return await fetch_traces(ToyPeer(swarm.client, link_config()), peers, bytes.fromhex(session))


async def generate(swarm: ToySwarm) -> str:
    """A whole generation; its trace id."""
    stream = swarm.ring(PROMPT, TOKENS)
    async for _ in stream:
        pass
    return stream.result.trace


@in_virtual_time
async def test_every_microsecond_of_a_token_is_accounted_for() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 3), (3, 4))
    timeline = Timeline(await traced(swarm, await generate(swarm)))
    assert [(stop.peer, stop.span) for stop in timeline.stops] == [
        (one.peer, (one.start, one.end)) for one in swarm.volunteers
    ]
    tokens = timeline.tokens()
    assert [token.position for token in tokens] == list(range(len(PROMPT) + 1, len(PROMPT) + TOKENS))
    for token in tokens:
        assert token.total_us == pytest.approx(3 * (STEP_US + LATENCY_US), abs=20)
        assert token.us == token.total_us
        computed = {part.peer: part.us for part in token.parts if part.what == "compute"}
        assert computed == pytest.approx(dict.fromkeys((one.peer for one in swarm.volunteers), STEP_US), abs=2)
        assert token.parts[-1] == TimelinePart("way", "", pytest.approx(3 * LATENCY_US, abs=20))  # type: ignore[arg-type]


@pytest.mark.parametrize("slow", [0, 1, 2], ids=["first", "middle", "last"])
@in_virtual_time
async def test_a_hop_that_was_slow_for_one_token_is_named(slow: int) -> None:
    swarm = await ToySwarm.start((0, 2), (2, 3), (3, 4))
    stream = swarm.ring(PROMPT, TOKENS)
    worker = swarm.volunteers[slow].worker
    async for _ in stream:
        worker.step_s = 0.5 if len(stream.result.ids) == 7 else STEP_US / 1e6
    (slowest,) = Timeline(await traced(swarm, stream.result.trace)).slowest(1)
    assert slowest.longest == TimelinePart("compute", swarm.volunteers[slow].peer, pytest.approx(500_000, abs=2))  # type: ignore[arg-type]
    assert abs(slowest.position - (len(PROMPT) + 7)) <= 1


@pytest.mark.parametrize("place", [0, 1, 2])
@in_virtual_time
async def test_a_link_that_was_slow_for_one_token_is_named(place: int) -> None:
    swarm = await ToySwarm.start((0, 2), (2, 3), (3, 4))
    source, target = (swarm.volunteers[index % 3].peer for index in (place, place + 1))
    stream = swarm.ring(PROMPT, TOKENS)
    async for _ in stream:
        latency_s = 0.3 if len(stream.result.ids) == 7 else LATENCY_US / 1e6
        swarm.world.set_path(source, target, Path(latency_s))
    (slowest,) = Timeline(await traced(swarm, stream.result.trace)).slowest(1)
    assert slowest.longest.what == "way"
    assert slowest.late == Late(source, target, pytest.approx(300_000 - LATENCY_US, abs=20))  # type: ignore[arg-type]


@in_virtual_time
async def test_a_stall_while_a_hop_is_replaced_is_on_the_way() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), (2, 4))
    stream = swarm.ring(PROMPT, TOKENS)
    async for _ in stream:
        if len(stream.result.ids) == 7:
            swarm.world.kill(swarm.volunteers[1].peer)
    traces = await traced(swarm, stream.result.trace)
    assert set(traces) == {swarm.volunteers[0].peer, swarm.volunteers[2].peer}
    (slowest,) = Timeline(traces).slowest(1)
    assert slowest.longest.what == "way"
    assert slowest.us / 1e6 == pytest.approx(stream.result.longest_stall_s, abs=0.05)


@in_virtual_time
async def test_nobody_knows_a_session_that_was_not() -> None:
    swarm = await ToySwarm.start((0, 4))
    await generate(swarm)
    traces = await traced(swarm, "00" * 16)
    assert traces == {} and Timeline(traces).slowest(5) == []


@in_virtual_time
async def test_a_peer_is_answered_one_question_at_a_time() -> None:
    swarm = await ToySwarm.start((0, 4))
    question = GetTrace(bytes.fromhex(await generate(swarm)))
    board = Switchboard(swarm.client, TRACE_PROTOCOL, HELLO, link_config())
    heard: list[Body] = []
    for _ in range(2):
        for _ in range(3):
            channel = await board.call(swarm.volunteers[0].peer, lambda _, body: heard.append(body), heard.append)
            channel.send(question)
        await asyncio.sleep(0.5)
    assert Counter(map(type, heard)) == {Trace: 2, End: 2, Error: 4}
    assert {body.code for body in heard if isinstance(body, Error)} == {ErrorCode.BUSY}


@in_virtual_time
async def test_what_is_no_question_is_refused() -> None:
    swarm = await ToySwarm.start((0, 4))
    board = Switchboard(swarm.client, TRACE_PROTOCOL, HELLO, link_config())
    with pytest.raises(PeerError) as caught:
        async for _ in ask(board, swarm.volunteers[0].peer, Trace(0, 1)):
            pass
    assert caught.value.code is ErrorCode.MALFORMED


@in_virtual_time
async def test_a_peer_that_hangs_costs_only_its_own_trace() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    session = await generate(swarm)
    swarm.world.hang(swarm.volunteers[1].peer)
    assert set(await traced(swarm, session)) == {swarm.volunteers[0].peer}


@in_virtual_time
async def test_a_running_session_has_a_trace() -> None:
    swarm = await ToySwarm.start((0, 4))
    stream = swarm.ring(PROMPT, TOKENS)
    async for _ in stream:
        if len(stream.result.ids) == 7:
            traces = await traced(swarm, stream.result.trace)
    assert 7 <= len(traces[swarm.volunteers[0].peer].steps) < TOKENS


@in_virtual_time
async def test_log_lines_of_a_session_carry_its_trace_and_not_its_id() -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("swarmnode")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        swarm = await ToySwarm.start((0, 2), (2, 4))
        stream = swarm.ring(PROMPT, TOKENS)
        async for _ in stream:
            pass
        await asyncio.sleep(0.5)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    session = stream.session.id
    told = [
        record.name.rsplit(".", 1)[-1] for record in lines if getattr(record, "trace", None) == trace_id(session).hex()
    ]
    assert told.count("client_session") == 1
    assert told.count("session") == 4  # at both hops it began and was over
    assert not any(session.hex()[:8] in str(vars(record)) for record in lines), "who knows the id may use the session"


def note(trace: SessionTrace, end: int, came_s: float) -> None:
    trace.record(
        end, 1, came_s=came_s, began_s=came_s + 0.001, ended_s=came_s + 0.003, sent_s=came_s + 0.0035, batch=end % 7 + 1
    )


def test_the_last_steps_of_a_session_are_kept() -> None:
    trace = SessionTrace(1, 3)
    for end in range(1, 1301):
        note(trace, end, came_s=100 + end / 10)
    steps = trace.trace().steps
    assert [step.end for step in steps] == list(range(1301 - MAX_TRACE_STEPS, 1301))
    assert steps[-1] == TraceStep(1300, 1, 129_900_000, 1000, 2000, 3500, 1300 % 7 + 1)


def test_times_that_do_not_fit_are_cut() -> None:
    trace = SessionTrace(0, 1)
    trace.record(1, 1, came_s=5.0, began_s=4.0, ended_s=1e6, sent_s=1e6, batch=1 << 20)
    (step,) = trace.trace().steps
    assert (step.wait_us, step.compute_us, step.stay_us, step.batch) == (0, MAX_TRACE_US, MAX_TRACE_US, 65535)


def test_the_session_that_ended_first_is_forgotten_first() -> None:
    traces: Recent[bytes, SessionTrace] = Recent(2)
    sessions = {bytes([number] * 16): SessionTrace(0, 1) for number in range(3)}
    for session, trace in sessions.items():
        traces[session] = trace
    first, *others = sessions
    assert traces.get(first) is None
    assert [traces.get(session) for session in others] == [sessions[session] for session in others]


def test_guesses_that_were_right_take_no_time_of_their_own_and_wrong_ones_are_counted() -> None:
    """A token and two guesses, the second of them wrong: the next step takes its place."""
    steps = TraceStep(5, 5, 0, 0, 10, 10, 1), TraceStep(8, 3, 100, 0, 10, 20, 1, 2), TraceStep(8, 1, 200, 0, 10, 20, 1)
    timeline = Timeline({"a": Trace(0, 4, steps)})
    (stop,) = timeline.stops
    assert (sorted(stop.decoded), stop.guessed, stop.wasted) == ([6, 7, 8], 2, 1)
    assert [token.total_us for token in timeline.tokens()] == [110, 0, 100]
