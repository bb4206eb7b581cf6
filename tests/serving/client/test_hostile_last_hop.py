"""What comes out of the last hop is a stranger's word: the client takes nothing that its session cannot have, and finds another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swarmnode.codec.body import HopSpec
from swarmnode.codec.messages import Mode, Open, Output, Want
from swarmnode.codec.tensors import Codec, DType, TensorInfo
from swarmnode.links.switchboard import Switchboard
from swarmnode.serving.client.client_session import SESSION_PROTOCOL, ClientSession
from swarmnode.serving.client.generation import GenerateOptions, RingStream
from swarmnode.serving.client.session_spec import SessionSpec, ids_entry
from swarmnode.serving.job import Job, JobResult
from swarmnode.serving.session.session import StageSession
from tests.net.virtual import in_virtual_time
from tests.peer.toy_swarm import HELLO, MODULUS, ToySwarm, Volunteer, expected, link_config, unpack

PROMPT = [5, 17, 3, 99, 42]
LAST_EPOCH = 2**32 - 1
HUGE = TensorInfo(Codec.TOPK, DType.FLOAT32, (1, 1, 1 << 31), 0)  # 131 kB that say they are 8.6 GB


def lies(volunteer: Volunteer, result: JobResult) -> None:
    """Let a volunteer bring forth this, whatever it should."""
    honest = volunteer.worker._result

    def lie(job: Job) -> JobResult:
        came = honest(job)
        return result if came.tokens or came.tensor else came

    volunteer.worker._result = lie  # type: ignore[method-assign]


@in_virtual_time
async def test_token_ids_beyond_the_vocabulary_are_the_last_hops_fault() -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4), (2, 4))
    honest, liar = swarm.volunteers[2].worker._result, swarm.volunteers[1]

    def lie(job: Job) -> JobResult:
        came = honest.__func__(liar.worker, job)  # type: ignore[attr-defined]
        return JobResult(tokens=tuple((position, (1 << 30,)) for position, _ in came.tokens)) if came.tokens else came

    liar.worker._result = lie  # type: ignore[method-assign]
    options, clock = GenerateOptions(max_new_tokens=8), asyncio.get_running_loop().time
    spec = options.spec(PROMPT, vocabulary=MODULUS)
    stream = RingStream(ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=clock), options)
    assert [token async for token in stream] == expected(PROMPT, 8)
    assert swarm.router.suspected == [liar.peer]


@pytest.mark.parametrize("shape", [(1, 1, 1 << 31), (1, 1, 1 << 21), (1, 2, 1), (2, 1, 1)])
@in_virtual_time
async def test_outputs_of_another_shape_are_never_decoded(shape: tuple[int, int, int]) -> None:
    swarm = await ToySwarm.start((0, 4), (0, 4))
    liar = swarm.volunteers[0]
    lies(liar, JobResult(tensors=((TensorInfo(Codec.TOPK, DType.FLOAT32, shape, 0), bytes(131_072)),)))
    spec = SessionSpec(Mode.DRIVEN, max_length=20, width=1)
    session = ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=asyncio.get_running_loop().time)
    await session.start()
    session.send(ids_entry(0, [PROMPT], Want.LAST), expect=len(PROMPT))
    received = await session.receive()
    assert received.output.tensor is not None
    assert unpack(received.output.tensor, received.payload) == expected(PROMPT, 1)
    assert swarm.router.suspected == [liar.peer]
    await session.close()


@pytest.mark.parametrize(
    ("codec", "dtype", "payload"),
    [
        (Codec.NONE, DType.FLOAT32, b"\0\0\xc0\x7f"),  # NaN
        (Codec.NONE, DType.FLOAT32, b"\0\0\x80\xff"),  # minus infinity
        (Codec.NONE, DType.BFLOAT16, b"\x80\x7f"),
        (Codec.NONE, DType.FLOAT16, b"\0\xfc"),
        (Codec.NONE, DType.FLOAT32, b"\0" * 3),
        (Codec.NONE, DType.FLOAT32, b"\0" * 8),
        (Codec.NONE, DType.FLOAT32, b""),
        (Codec.FP16, DType.FLOAT32, b"\0\0"),  # last hops send outputs as they are
        (Codec.INT8, DType.FLOAT32, b"\xff" * 3),
        (Codec.INT4, DType.FLOAT32, b"\xff" * 5),
    ],
)
@in_virtual_time
async def test_outputs_that_are_not_finite_or_of_another_length_are_the_last_hops_fault(
    codec: Codec, dtype: DType, payload: bytes
) -> None:
    swarm = await ToySwarm.start((0, 4), (0, 4))
    liar = swarm.volunteers[0]
    lies(liar, JobResult(tensors=((TensorInfo(codec, dtype, (1, 1, 1)), payload),)))
    spec = SessionSpec(Mode.DRIVEN, max_length=20, width=1)
    session = ClientSession(swarm.switchboard, swarm.router, spec, swarm.config, clock=asyncio.get_running_loop().time)
    await session.start()
    session.send(ids_entry(0, [PROMPT], Want.LAST), expect=len(PROMPT))
    received = await session.receive()
    assert received.output.tensor is not None
    assert unpack(received.output.tensor, received.payload) == expected(PROMPT, 1)
    assert swarm.router.suspected == [liar.peer]
    await session.close()


@in_virtual_time
async def test_a_text_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = await ToySwarm.start((0, 2), (2, 4))
    publish = StageSession._publish

    def never_final(self: StageSession, position: int, output: Output, payload: Any, **how: Any) -> None:
        publish(self, position, Output(output.ids, False, output.tensor), payload, **how)

    monkeypatch.setattr(StageSession, "_publish", never_final)
    assert [token async for token in swarm.ring(PROMPT, 8)] == expected(PROMPT, 8)


@in_virtual_time
async def test_who_takes_a_session_over_does_not_lock_its_owner_out() -> None:
    """A hop knows the session's id: it may open it elsewhere, in the last epoch that there is."""
    swarm = await ToySwarm.start((0, 2), (2, 4), (0, 2))
    thief = swarm.world.join()
    last = swarm.volunteers[1]
    assert await thief.connect(await swarm.client.addresses(), timeout_s=1)
    board = Switchboard(thief, SESSION_PROTOCOL, HELLO, link_config())
    tokens = []
    swarm.router.suspect = lambda _peer, _reason: None  # type: ignore[method-assign]  # it announces itself again
    stream = swarm.ring(PROMPT, 40)
    async for token in stream:
        tokens.append(token)
        if len(tokens) == 5:
            (session,) = last.server._sessions.values()
            route = (HopSpec(thief.peer_id, 0, 2), HopSpec(last.peer, 2, 4))
            sampling = session.opened.sampling
            opened = Open(session.id, LAST_EPOCH, route, 1, Mode.RING, 1, session.opened.max_length, sampling=sampling)
            channel = await board.call(last.peer, lambda _frame, _body: None, lambda _error: None)
            channel.send(opened)
            await asyncio.sleep(0.1)
            assert session.epoch == LAST_EPOCH
            swarm.world.kill(swarm.volunteers[0].peer)
    assert tokens == expected(PROMPT, 40)
