"""What one volunteer says decides nothing for all: whatever it claims, the others' training goes on. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from swarmnode.codec.body import Body
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, decode_body, encode_body
from swarmnode.codec.training_messages import MAX_TERM, Backward, Done, Failed, Reduced, Status
from swarmnode.errors import ErrorCode
from tests.peer.training_swarm import until
from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import STEPS, Scenario, in_scenario

PAIRS = (0, 0, 1, 1, 2, 2)
LATE = 20  # frames: it has shown that it can do better

Lie = Callable[[Body], Body]


class Liar(Saboteur):
    """Says something else than it should, from its message LATE on."""

    def __init__(self, lie: Lie, after: int = LATE) -> None:
        super().__init__(Ill.PINGS, after)
        self._lie = lie
        self.lies = 0

    def instead_of(self, frame: Frame) -> Frame | None:
        if not self.tripped or not frame.channel:
            return frame
        said = decode_body(frame.kind, frame.body)
        told = self._lie(said)
        if told is said:
            return frame
        self.lies += 1
        return Frame(KIND_OF[type(told)], frame.channel, frame.seq, encode_body(told), frame.payload)


def squares(value: float) -> Lie:
    return lambda said: (
        msgspec.structs.replace(said, squares=(value,) * len(said.squares)) if isinstance(said, Reduced) else said
    )


def term(value: int) -> Lie:
    return lambda said: msgspec.structs.replace(said, term=value) if isinstance(said, Status) else said


def not_finite(said: Body) -> Body:
    if not isinstance(said, Status) or not said.run:
        return said
    return Failed(0, "", ErrorCode.NOT_FINITE, said.start)


def loss(value: float) -> Lie:
    def lie(said: Body) -> Body:
        return msgspec.structs.replace(said, loss=value) if isinstance(said, Backward | Done) else said

    return lie


def newest(said: Body) -> Body:
    """As if it were far ahead of all."""
    return msgspec.structs.replace(said, step=1 << 40, kept=(1 << 40,)) if isinstance(said, Status) else said


LIES: dict[str, Lie] = {
    **{f"a square of {value}": squares(value) for value in (-1.0, math.nan, math.inf, 1e300, 1e190)},
    "the last term": term(MAX_TERM),
    "a term out of all reason": term(1 << 36),
    "a term that may be": term(1 << 30),
    "steps that nobody has made": newest,
    "NaN in no run": not_finite,
    "a loss that is NaN": loss(math.nan),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_the_losses_are_those_of_one_process(tmp_path: Path, lie: Lie) -> None:
    saboteur = Liar(lie)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        await scene.train()

    in_scenario(tmp_path, test, peer_4=saboteur)
    assert saboteur.lies, "it had its chance"


@pytest.mark.parametrize("value", [1e60, 1e190])
def test_the_only_holder_of_a_unit_takes_nobodys_updates_away(tmp_path: Path, value: float) -> None:
    """By a norm of 1e30 the others would have learnt nothing any more; by an impossible one it is left alone, and named."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        weight = scene.swarm.volunteers[0].segment.parameters()[0][
            "weight"
        ]  # a bias of few values may come back to where it was
        before = weight.detach().clone()
        with contextlib.suppress(AssertionError, TimeoutError):  # other losses than those of one process, or none
            await scene.train()
        if value < 1e90:
            assert len(scene.losses) == STEPS
            assert float((weight.detach() - before).abs().max()) > 1e-3, "the others go on learning"
        else:
            assert any(scene.swarm.volunteers[1].peer[-8:] in text for text in scene.waits), "the user hears who it is"

    in_scenario(tmp_path, test, peer_1=Liar(squares(value), 1))


class Slanderer(Saboteur):
    """Trainer that says of a stage that it failed, instead of reporting a microbatch as done, from its microbatch `after` on."""

    def __init__(self, code: ErrorCode, after: int) -> None:
        super().__init__(Ill.PINGS, 0)
        self._code, self._after = code, after
        self.accused = ""
        self.done = 0

    @property
    def claims(self) -> int:
        """Number of claims so far."""
        return self.done - self._after

    def instead_of(self, frame: Frame) -> Frame | None:
        if frame.kind != FrameKind.DONE:
            return frame
        self.done += 1
        if self.claims <= 0:
            return frame
        done = decode_body(frame.kind, frame.body)
        assert isinstance(done, Done)
        told = Failed(done.lease, self.accused, self._code, run=done.run)
        return Frame(KIND_OF[Failed], frame.channel, frame.seq, encode_body(told))


@pytest.mark.parametrize("after", [0, 6], ids=["a stranger", "after it has fed something"])
@pytest.mark.parametrize(
    "code", [ErrorCode.NOT_FINITE, ErrorCode.PEER_LOST, ErrorCode.INTERNAL], ids=lambda code: code.name
)
def test_a_stage_that_one_trainer_slanders_works_for_another(tmp_path: Path, code: ErrorCode, after: int) -> None:
    slanderer = Slanderer(code, after)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        slanderer.accused = scene.swarm.volunteers[-1].peer
        _, false = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
        feeding = asyncio.ensure_future(false.train(asyncio.Event()))
        await until(lambda: slanderer.claims > 0, "it slanders")
        await scene.train()
        await scene.swarm.settled(STEPS)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
        assert not any(volunteer.standing.shunned for volunteer in scene.swarm.volunteers)

    in_scenario(tmp_path, test, **{f"peer_{len(PAIRS)}": slanderer})
