"""Spot checks in a whole swarm: a replica whose microbatches are not what it says is found and named, in virtual time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from swarmnode.codec.audit_messages import (
    SPOT_CHECK_PROTOCOL,
    Accusation,
    CommitmentReply,
    GetCommitment,
    GetMicrobatch,
    MicrobatchRecord,
    MicrobatchReply,
)
from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import Codec
from swarmnode.compute.training.learner import Learner
from swarmnode.errors import ErrorCode, PeerError
from swarmnode.ledger import MemoryLedger
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.peer.findings_record import Findings
from swarmnode.peer.questions import Answer, ask
from swarmnode.plan.audits import AuditBudget
from swarmnode.swarm.records.run import Averaging
from swarmnode.swarm.records.statement import Commitment, sign_commitment
from swarmnode.tolerances import TRIALS
from swarmnode.training.spot_checks.spot_checks import RECOMPUTED, Suspicions
from tests.compute.training.toy import ToySegment
from tests.peer import training_swarm
from tests.peer.training_swarm import HELLO, Volunteer, local_losses, sign_as, toy_run
from tests.training.test_hangs import LONGEST_S, Scenario, in_scenario
from tests.training.test_robust import FalseGradients, WideSegment
from tests.training.test_robust import batches as wide_batches

STEPS = 7
LIES_FROM = 2  # step: it was honest before

Lie = Callable[[Tensor], Tensor]


def perturbed(value: Tensor) -> Tensor:
    return value * 1.01


GRADIENT_LIES: dict[str, Lie] = {
    "turned round": lambda gradient: -gradient,
    "100 times": lambda gradient: 100 * gradient,
    "nothing": torch.zeros_like,
    "noise": lambda gradient: torch.randn_like(gradient) * gradient.norm() / len(gradient) ** 0.5,
    "a drift of 1 %": perturbed,
}


class FalseLearner(Learner):
    """What it adds to its sums, sends on or returns is something else than it computes, and it commits to that."""

    adds: Lie | None = None
    sends: Lie | None = None
    returns: Lie | None = None

    def forward(self, lease: int, index: int, start: int, end: int, values: Any, labels: Any = ()) -> Any:
        outputs = super().forward(lease, index, start, end, values, labels)
        return _first(outputs, self.sends if self.step >= LIES_FROM else None)

    def backward(self, lease: int, grads: Sequence[Tensor | None]) -> Any:
        before = [sums_N.clone() for sums_N in self.accumulators(0, self.segment.units).values()]
        inputs = super().backward(lease, grads)
        if self.step < LIES_FROM:
            return inputs
        for sums_N, before_N in zip(self.accumulators(0, self.segment.units).values(), before, strict=True):
            if self.adds is not None:
                sums_N.copy_(before_N + self.adds(sums_N - before_N))
        return _first(inputs, self.returns)


def _first(values: Any, lie: Lie | None) -> Any:
    return values if lie is None or values[0] is None else (lie(values[0]), *values[1:])


def in_numpy(lie: Lie) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """For what travels."""

    def false(values: NDArray[np.float32]) -> NDArray[np.float32]:
        told: NDArray[np.float32] = lie(torch.from_numpy(values.copy())).numpy()
        return told

    return false


async def train(scene: Scenario, *, steps: int = STEPS, averaging: Averaging | None = None) -> list[float]:
    """The losses of what has joined."""
    scene.run = toy_run(scene.batches, steps, averaging=averaging or Averaging())
    _, trainer = await scene.swarm.trainer(scene.run, scene.batches, scene._step, scene._wait)
    assert await asyncio.wait_for(trainer.train(asyncio.Event()), LONGEST_S) == steps
    scene.left_out = trainer.left_out  # type: ignore[attr-defined]
    return [scene.losses[step] for step in range(steps)]


async def join(scene: Scenario, *spans: tuple[int, int], share: float = 1.0) -> list[Volunteer]:
    """Volunteers who spend so much of what they compute on checks."""
    joined = [await scene.swarm.join(*span) for span in spans]
    for volunteer in joined:
        volunteer.spot_checks.budget = AuditBudget(share)
    return joined


def make_false(monkeypatch: pytest.MonkeyPatch, liar: Volunteer, **lies: Lie) -> None:
    """From now on; its learner is made when the run begins."""
    real = Learner

    def make(segment: Any, *arguments: Any, **named: Any) -> Learner:
        if segment is not liar.segment:
            return real(segment, *arguments, **named)
        learner = FalseLearner(segment, *arguments, **named)
        for name, lie in lies.items():
            setattr(learner, name, lie)
        return learner

    monkeypatch.setattr("swarmnode.training.worker.training_parts.Learner", make)


def counts(volunteers: Sequence[Volunteer]) -> Counter[str]:
    return sum((volunteer.spot_checks.counts for volunteer in volunteers), Counter())


@pytest.mark.parametrize("spans", [[(0, 3)] * 3, [(0, 1)] * 2 + [(1, 3)] * 2], ids=["whole", "two stages"])
def test_honest_replicas_pass(tmp_path: Path, spans: list[tuple[int, int]]) -> None:
    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *spans)
        losses = await train(scene)
        assert losses == pytest.approx(local_losses(scene.run, scene.batches), rel=1e-5)
        found = counts(volunteers)
        assert found["passed"] > STEPS and not found["false"] and not found["void"], found

    in_scenario(tmp_path, test)


def test_nobody_is_blamed_for_what_its_device_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of units that draw noise another device draws another: replicas differ, and all of them are honest."""
    monkeypatch.setattr(ToySegment, "is_portable", False)

    async def test(scene: Scenario) -> None:
        *_, unlike = volunteers = await join(scene, *[(0, 3)] * 3)
        make_false(monkeypatch, unlike, adds=perturbed)
        await train(scene)
        assert not scene.left_out and not counts(volunteers)  # type: ignore[attr-defined]

    in_scenario(tmp_path, test)


@pytest.mark.parametrize("lie", GRADIENT_LIES.values(), ids=GRADIENT_LIES)
def test_who_adds_what_is_not_its_gradient_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: Lie
) -> None:
    async def test(scene: Scenario) -> None:
        *honest, liar = await join(scene, *[(0, 3)] * 4)
        make_false(monkeypatch, liar, adds=lie)
        await train(scene)
        assert scene.left_out == {liar.peer}, "the user hears who it is"  # type: ignore[attr-defined]
        assert all(volunteer.standing.shunned <= {liar.peer} for volunteer in honest), counts(honest)

    in_scenario(tmp_path, test)


@pytest.mark.parametrize(
    ("codec", "lie"),
    [
        (Codec.NONE, torch.neg),
        (Codec.NONE, perturbed),
        (Codec.FP16, torch.zeros_like),
        (Codec.INT8, torch.neg),
    ],
    ids=["turned round", "a drift of 1 %", "fp16, nothing", "int8, turned round"],
)
def test_who_contributes_what_it_has_not_committed_to_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: Codec, lie: Lie
) -> None:
    """All that it computes, sends and signs is right, and what it contributes to the sums is not."""
    monkeypatch.setattr(training_swarm, "ToySegment", WideSegment)

    async def test(scene: Scenario) -> None:
        scene.batches = wide_batches()
        *honest, liar = await join(scene, *[(0, 3)] * 4)
        await train(scene, averaging=Averaging(codec=codec))
        assert scene.left_out == {liar.peer}, counts(honest)  # type: ignore[attr-defined]
        assert all(volunteer.standing.shunned <= {liar.peer} for volunteer in honest), counts(honest)

    in_scenario(tmp_path, test, peer_3=FalseGradients(in_numpy(lie)))


OVERLAPPING = [(0, 2), (1, 3), (0, 3), (0, 3)]


def test_who_contributes_falsely_to_the_sums_of_units_that_it_shares_with_others_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nobody can compute once more is held against what was signed all the same."""
    monkeypatch.setattr(training_swarm, "ToySegment", WideSegment)

    async def test(scene: Scenario) -> None:
        scene.batches = wide_batches()
        *honest, liar = await join(scene, *OVERLAPPING)
        await train(scene)
        assert scene.left_out == {liar.peer}, counts(honest)  # type: ignore[attr-defined]
        assert all(volunteer.standing.shunned <= {liar.peer} for volunteer in honest), counts(honest)

    in_scenario(tmp_path, test, peer_3=FalseGradients(in_numpy(torch.neg)))


def test_honest_replicas_of_other_spans_keep_their_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(training_swarm, "ToySegment", WideSegment)
    caplog.set_level(logging.INFO, "swarmnode.training.spot_checks")

    async def test(scene: Scenario) -> None:
        scene.batches = wide_batches()
        volunteers = await join(scene, *OVERLAPPING)
        await train(scene)
        found = counts(volunteers)
        assert found["passed"] > STEPS and not found["false"] and not scene.left_out, found  # type: ignore[attr-defined]
        assert not [one for one in caplog.messages if "had no result" in one]

    in_scenario(tmp_path, test)


def test_who_does_not_show_all_that_it_contributes_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it found false: it may have had no room."""
    monkeypatch.setattr(training_swarm, "ToySegment", WideSegment)

    async def test(scene: Scenario) -> None:
        scene.batches = wide_batches()
        *honest, forgetful = await join(scene, *[(0, 3)] * 3)
        records = forgetful.spot_checks.records
        of = records.of
        records.of = lambda run, step: dict(list(of(run, step).items())[1:])  # type: ignore[method-assign]
        await train(scene)
        assert not scene.left_out and not counts(honest)["false"]  # type: ignore[attr-defined]
        assert counts(honest)["void"] and all(one.standing.trust(forgetful.peer) == 0 for one in honest)

    in_scenario(tmp_path, test)


def a_million_times(value: Tensor) -> Tensor:
    return 1e6 * value


@pytest.mark.parametrize("lie", [perturbed, torch.neg, a_million_times])
@pytest.mark.parametrize("what", ["sends", "returns", "adds"])
def test_who_sends_what_it_does_not_compute_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, lie: Lie
) -> None:
    """It signs for it, and no honest stage is blamed, however large the values become."""

    async def test(scene: Scenario) -> None:
        before, *middle, behind = await join(scene, (0, 1), *[(1, 2)] * 3, (2, 3))
        make_false(monkeypatch, middle[2], **{what: lie})
        await train(scene)
        assert scene.left_out == {middle[2].peer}, counts(middle)  # type: ignore[attr-defined]
        assert not (before.standing.shunned | behind.standing.shunned)
        assert all(one.standing.shunned <= {middle[2].peer} for one in middle[:2])

    in_scenario(tmp_path, test)


def test_of_two_the_one_that_coordinates_believes_what_it_has_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(scene: Scenario) -> None:
        _, liar = await join(scene, (0, 3), (0, 3))
        make_false(monkeypatch, liar, adds=perturbed)
        await train(scene)
        assert scene.left_out == {liar.peer}  # type: ignore[attr-defined]

    in_scenario(tmp_path, test)


def test_no_more_is_computed_once_more_than_the_budget_has(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *[(0, 3)] * 2, share=AuditBudget().share)
        await train(scene)
        budgets = [volunteer.spot_checks.budget for volunteer in volunteers]
        assert counts(volunteers)["passed"] <= 0.2 * STEPS * scene.run.microbatches
        assert all(budget._spent_s <= budget._earned_s + 4 * RECOMPUTED for budget in budgets), budgets

    in_scenario(tmp_path, test)


def test_what_was_kept_is_given_back_when_the_step_is_over(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, (0, 1), (1, 2), (2, 3))
        held: list[int] = []
        scene.on_step = lambda _step: held.append(max(one.spot_checks.records.size_bytes for one in volunteers))
        await train(scene)
        await scene.swarm.settled(STEPS)
        assert [one.spot_checks.records.size_bytes for one in volunteers] == [0, 0, 0]

    in_scenario(tmp_path, test)


def test_where_there_is_no_room_nothing_is_kept_and_training_goes_on(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *[(0, 3)] * 2)
        for volunteer in volunteers:
            volunteer.spot_checks.records._ledger = MemoryLedger(limit_bytes=0)
        losses = await train(scene)
        assert losses == pytest.approx(local_losses(scene.run, scene.batches), rel=1e-5)
        found = counts(volunteers)
        assert found["void"] and not found["passed"] and not found["false"]

    in_scenario(tmp_path, test)


@pytest.mark.parametrize("garbage", ["other microbatch", "other payload", "other shapes", "false signature", "nothing"])
def test_who_shows_something_else_than_it_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, garbage: str) -> None:
    async def test(scene: Scenario) -> None:
        *honest, liar = await join(scene, *[(0, 3)] * 4)
        server = liar.spot_checks._server
        answer = server.answer

        async def lie(peer: PeerId, question: Any) -> Any:
            body, payload = await answer(peer, question)
            if isinstance(body, MicrobatchReply) and garbage == "other microbatch":
                body = MicrobatchReply(msgspec.structs.replace(body.record, loss=body.record.loss + 1e-3))
            elif isinstance(body, MicrobatchReply) and garbage == "other payload":
                payload = (bytes(len(payload[0])), *payload[1:])
            elif isinstance(body, MicrobatchReply) and garbage == "other shapes":  # and it has signed for them
                received = body.record.received
                values = tuple(msgspec.structs.replace(info, shape=(1 << 20, 64)) for info in received.values)
                record = msgspec.structs.replace(body.record, received=msgspec.structs.replace(received, values=values))
                body = MicrobatchReply(record)
            elif isinstance(body, CommitmentReply) and garbage == "false signature":
                body = CommitmentReply(body.commitment[:-1] + bytes([body.commitment[-1] ^ 1]))
            elif garbage == "nothing":
                body, payload = Error(ErrorCode.INTERNAL), ()
            return Answer(body, payload)

        server.answer = lie
        if garbage == "other shapes":
            monkeypatch.setattr(MicrobatchRecord, "digest", property(lambda _record: bytes(32)))
        losses = await train(scene, steps=6)
        if garbage in ("other microbatch", "other payload"):
            assert scene.left_out == {liar.peer}  # type: ignore[attr-defined]
        else:
            assert losses == pytest.approx(local_losses(scene.run, scene.batches), rel=1e-5)
            assert not counts(honest)["false"], "it may have had to let go of it"

    in_scenario(tmp_path, test)


def test_an_accusation_is_looked_into_and_not_believed_and_in_vain_it_costs_its_author(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        accuser, accused, judge = await join(scene, *[(0, 3)] * 3)
        stranger = scene.swarm.world.join().peer_id
        told: list[int] = []

        def accuse(step: int) -> None:
            said = Commitment(HELLO.swarm, accused.peer, scene.run.id, step, 0, bytes(32))
            raw = sign_commitment(said, sign_as(accused.peer))
            for author in (accuser.peer, stranger, accused.peer):
                for commitment in (raw, raw[:-1], b""):
                    judge.spot_checks._receive(author, Accusation(scene.run.id, accused.peer, commitment))
            told.append(len(judge.spot_checks._suspicions))

        scene.on_step = accuse
        await train(scene)
        assert max(told) == 2 and not scene.left_out, "one of each author"  # type: ignore[attr-defined]
        assert judge.spot_checks.counts["passed"] > 0 and not counts([accuser, judge])["false"]
        assert judge.standing.doubted == {accuser.peer, stranger} and told[-1] == 0, (
            "their next ones are not listened to"
        )

    in_scenario(tmp_path, test)


def test_suspicions(tmp_path: Path) -> None:
    standing = Findings(tmp_path / "standing.json", lambda: 0.0)
    suspicions = Suspicions(standing)
    suspicions.record("author", "accused")
    suspicions.record("author", "another")
    assert suspicions.next({"accused", "another", "others"}) is None, "a stranger to the step chooses nobody"
    assert suspicions.next({"author", "accused", "another"}) == "accused"
    suspicions.record_check("accused", "void")
    for _ in range(TRIALS - 1):
        suspicions.record_check("accused", "passed")
    assert len(suspicions) == 0 and not standing.doubted, "what came to nothing proves nothing"
    for accused in ("a", "b", "c"):
        suspicions.record("liar", accused)
        suspicions.record("honest", accused)
        for _ in range(TRIALS):
            suspicions.record_check(accused, "passed")
        suspicions.record("liar", "d")
    assert standing.doubted == {"liar", "honest"} and len(suspicions) == 0
    suspicions.record("finder", "false one")
    suspicions.record_check("false one", "false")
    assert "finder" not in standing.doubted and len(suspicions) == 0


def test_what_a_training_is_fed_is_shown_to_its_stages_alone(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *[(0, 3)] * 2)
        network = scene.swarm.world.join()
        await network.connect(await volunteers[0].network.addresses(), timeout_s=1)
        board = Switchboard(network, SPOT_CHECK_PROTOCOL, HELLO, LinkConfig())
        codes: list[ErrorCode] = []

        async def pry() -> None:
            for question in (GetCommitment(scene.run.id, 1), GetMicrobatch(scene.run.id, 1, 0, 0, bytes(16))):
                for volunteer in volunteers:
                    with pytest.raises(PeerError) as caught:
                        _ = [answer async for answer in ask(board, volunteer.peer, question)]
                    codes.append(caught.value.code)

        tasks = Tasks("pry", on_crash=None)
        scene.on_step = lambda _step: tasks.spawn(pry(), "pry", awaited=True)
        await train(scene, steps=4)
        await tasks.close()
        await board.close()
        assert codes and set(codes) == {ErrorCode.REFUSED}
        assert counts(volunteers)["passed"], "they show it to one another"

    in_scenario(tmp_path, test)
