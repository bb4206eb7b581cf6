"""A stage that sends something else than it computes and signs: it is found by the hops beside it, kept away from them, and no
honest stage is blamed for what becomes of it. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from swarmnode.codec.audit_messages import (
    Accusation,
    GetMicrobatch,
    GetSketches,
    SketchesReply,
)
from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import KIND_OF, Error, decode_body, encode_body
from swarmnode.codec.training_messages import Backward, Forward, Reduce, Reduced
from swarmnode.compress.codecs import decode_values, encode_values
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.recomputation import additions_apart, gradient_sketch
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.compute.training.segment import Values
from swarmnode.errors import ErrorCode
from swarmnode.net.addressing.addresses import Claimant
from swarmnode.net.interfaces import PeerId
from swarmnode.net.tasks import Tasks
from swarmnode.plan.audits import AuditBudget
from swarmnode.training.spot_checks.step_records import StoredMicrobatch
from tests.compute.training.toy import ToySegment
from tests.peer.training_swarm import Volunteer, local_losses
from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import Scenario, in_scenario
from tests.training.test_spot_checks import counts, join, train

PAIRS = [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]
LIAR = 3  # of the middle unit
FROM = 20  # frames: it was honest for a step
STEPS = 8
LONG = 24  # steps, in which its neighbours have drawn it: each draws one of two hops before or behind it
WAYS = {"activations": FrameKind.FORWARD, "gradients": FrameKind.BACKWARD}
ADAM = 0.1 / 0.001**0.5  # learning rates: the most that AdamW moves a parameter in a step


class Scales(Saboteur):
    """Sends its values times a factor, in frames of this kind, to all peers or to one of them."""

    def __init__(self, kind: FrameKind, factor: float) -> None:
        super().__init__(Ill.PINGS, FROM)
        self._kind, self._factor = kind, factor
        self.lies = 0

    def instead_of(self, frame: Frame) -> Frame | None:
        if not self.tripped or frame.kind != self._kind or not frame.payload:
            return frame
        body = decode_body(frame.kind, frame.body)
        assert isinstance(body, Forward | Backward)
        self.lies += 1
        infos, payload = encode_values([self._factor * one for one in decode_values(body.values, frame.payload, "cpu")])
        assert infos == body.values
        return msgspec.structs.replace(frame, payload=b"".join(payload))


def draw_by(seed: int, volunteers: Sequence[Volunteer]) -> None:
    """Let the volunteers draw their checks by this seed."""
    for number, volunteer in enumerate(volunteers):
        volunteer.spot_checks.dice = random.Random(f"{seed}.{number}")


async def join_with_liar(scene: Scenario, share: float = 1.0) -> list[Volunteer]:
    """Let the volunteers of PAIRS join. The liar accuses no peer: it would be idle before others find it."""
    volunteers = await join(scene, *PAIRS, share=share)
    volunteers[LIAR].spot_checks.budget = AuditBudget(0.0)
    return volunteers


def compute_in(number_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let learners compute in this format, as they do on a card."""
    dtype = torch.bfloat16 if number_format == "bfloat16" else None
    monkeypatch.setattr("swarmnode.compute.training.learner.autocast_dtype", lambda _device, *, wanted: dtype)


def shunned_by_honest(volunteers: Sequence[Volunteer], liar: int = LIAR) -> set[int]:
    """Return the numbers of the volunteers that an honest one shuns."""
    numbers = {volunteer.peer: number for number, volunteer in enumerate(volunteers)}
    honest = [volunteer for volunteer in volunteers if volunteer is not volunteers[liar]]
    return {numbers[peer] for volunteer in honest for peer in volunteer.standing.shunned}


@pytest.mark.parametrize("number_format", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1e6, -1.0])
@pytest.mark.parametrize("kind", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("seed", range(2))
def test_a_liar_with_a_replica_gets_no_more_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: FrameKind, factor: float, number_format: str, seed: int
) -> None:
    """And until then no parameter moves farther than in any step: gradients are clipped. The spot check convicted the honest
    stage behind a liar, for rounding in sums that the liar's values had made large."""
    compute_in(number_format, monkeypatch)
    sender = Scales(kind, factor)

    async def test(scene: Scenario) -> None:
        volunteers = await join_with_liar(scene)
        draw_by(seed, volunteers)
        units = [one for volunteer in volunteers for one in volunteer.segment.parameters().values()]
        weights = [weight for unit in units for weight in unit.values()]
        before = [weight.detach().clone() for weight in weights]
        lies: list[int] = []
        moved: list[float] = []

        def note(_step: int) -> None:
            lies.append(sender.lies)
            moved.append(max(float((now - old).abs().max()) for now, old in zip(weights, before, strict=True)))

        scene.on_step = note
        await train(scene, steps=LONG)
        assert 0 < sender.lies == lies[-2], "it is on no route any more"
        assert shunned_by_honest(volunteers) == {LIAR}, counts(volunteers)
        most = ADAM * scene.run.learning_rate
        assert all(far <= most * (step + 1) for step, far in enumerate(moved)), moved
        assert scene.losses[LONG - 1] < 1.1 * local_losses(scene.run, scene.batches)[LONG - 1]

    in_scenario(tmp_path, test, **{f"peer_{LIAR}": sender})


@pytest.mark.parametrize("kind", WAYS.values(), ids=WAYS)
def test_at_the_default_share_it_takes_some_steps(tmp_path: Path, kind: FrameKind) -> None:
    sender = Scales(kind, -1.0)
    lies: list[int] = []

    async def test(scene: Scenario) -> None:
        volunteers = await join_with_liar(scene, AuditBudget().share)
        scene.on_step = lambda _step: lies.append(sender.lies)
        await train(scene, steps=40)
        assert 0 < sender.lies == lies[-2]
        assert shunned_by_honest(volunteers) == {LIAR}

    in_scenario(tmp_path, test, **{f"peer_{LIAR}": sender})


@pytest.mark.parametrize("factor", [1e6, -1.0])
def test_where_nobody_else_has_the_unit_the_neighbours_know_and_training_goes_on(tmp_path: Path, factor: float) -> None:
    sender = Scales(FrameKind.FORWARD, factor)

    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, (0, 1), (0, 1), (1, 2), (2, 3), (2, 3))
        await train(scene, steps=STEPS)
        assert sender.lies > STEPS, "in all steps"
        assert shunned_by_honest(volunteers, 2) == {2}, "no honest stage"

    in_scenario(tmp_path, test, peer_2=sender)


def test_where_the_coordinator_has_seen_it_itself_the_others_wait_for_another_holder(tmp_path: Path) -> None:
    sender = Scales(FrameKind.BACKWARD, -1.0)

    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, (0, 1), (1, 2), (2, 3))
        joining = Tasks("joining", on_crash=None)

        def wait(_why: str, missing: tuple[int, ...]) -> None:
            if missing == (1,) and len(scene.swarm.volunteers) == 3:
                joining.spawn(scene.swarm.join(1, 2), "join")

        scene._wait = wait  # type: ignore
        await train(scene)
        await joining.close()
        assert scene.left_out == {volunteers[1].peer}, "the user hears who it is"  # type: ignore[attr-defined]
        assert len(scene.swarm.volunteers) == 4

    in_scenario(tmp_path, test, peer_1=sender)


def test_an_honest_stage_that_one_neighbour_accuses_works_for_the_others(tmp_path: Path) -> None:
    """Who accuses loses as many neighbours as it accuses, and nobody else loses more than it."""

    class Slanders(Saboteur):
        accused = ""

        def instead_of(self, frame: Frame) -> Frame | None:
            if frame.kind != FrameKind.REDUCED:
                return frame
            told = decode_body(frame.kind, frame.body)
            assert isinstance(told, Reduced)
            body = encode_body(msgspec.structs.replace(told, suspect=self.accused))
            return Frame(KIND_OF[Reduced], frame.channel, frame.seq, body)

    slanderer = Slanders(Ill.PINGS, 0)

    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *PAIRS)
        slanderer.accused = volunteers[2].peer
        worked: list[int] = []
        scene.on_step = lambda _step: worked.append(volunteers[2].spot_checks.records._step[1])
        losses = await train(scene, steps=STEPS)
        assert losses == pytest.approx(local_losses(scene.run, scene.batches), rel=1e-5)
        assert worked[-1] >= STEPS - 2, "it has kept microbatches of the last steps"
        assert not scene.left_out and not counts(volunteers)["false"]  # type: ignore[attr-defined]

    in_scenario(tmp_path, test, peer_4=slanderer)


class Restless(ToySegment):
    """Computes a little else each time, as a card may."""

    is_portable = False

    def forward(self, values: Values, start: int, end: int, seed: int, labels: Values = ()) -> Values:  # type: ignore[override]
        outputs = super().forward(values, start, end, seed, labels)
        return outputs if end == self.units else tuple(one * (1 + 1e-6 * torch.rand(())) for one in outputs)


def kill_within(scene: Scenario, victim: Volunteer, step: int) -> None:
    """Kill a volunteer when it has counted two microbatches of a step."""
    records = victim.spot_checks.records
    close, closed = records.close, 0

    def closing(kept: StoredMicrobatch) -> None:
        nonlocal closed
        close(kept)
        closed += bool(kept.parameters) and kept.body.step == step
        if closed == 2 and victim.alive:
            asyncio.get_running_loop().call_soon(scene.swarm.kill, victim)

    records.close = closing  # type: ignore[method-assign]


def test_a_microbatch_that_was_computed_again_convicts_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that dies after it has counted makes others meet again, with values that differ from those that were signed."""
    monkeypatch.setattr("tests.peer.training_swarm.ToySegment", Restless)

    async def test(scene: Scenario) -> None:
        volunteers = await join(scene, *PAIRS, (2, 3), (1, 2), (0, 1))
        for step, number in ((2, 5), (4, 7), (5, 8)):
            kill_within(scene, volunteers[number], step)
        await train(scene, steps=STEPS)
        live = [volunteer for volunteer in volunteers if volunteer.alive]
        assert len(live) == len(volunteers) - 3
        assert not counts(live)["false"] and not any(volunteer.standing.shunned for volunteer in live)

    in_scenario(tmp_path, test)


def test_a_hop_shows_its_neighbours_what_they_exchanged_and_no_data(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        first, _, middle, replica, last, _ = await join(scene, *PAIRS, share=0.0)
        check, server = middle.spot_checks.check, middle.spot_checks._server
        shown: list[SketchesReply] = []
        refused: Counter[tuple[type[object], ErrorCode]] = Counter()

        async def look(run: bytes, step: int) -> None:
            for asker in (first, last):
                questions = [GetSketches(run, step, number) for number in range(3)]
                for question in (
                    *questions,
                    GetMicrobatch(run, step, 0, 1, bytes(16)),
                    Accusation(run, first.peer, b""),
                ):
                    reply, payload = await server.answer(Claimant("", asker.peer), question)
                    assert not any(map(len, payload))
                    if isinstance(reply, SketchesReply):
                        kept = middle.spot_checks.records.of(run, step).values()
                        (one,) = (one for one in kept if one.record() == reply.records[0])
                        assert asker.peer in one.neighbours and reply.lease == one.body.lease
                        shown.append(reply)
                    elif not isinstance(question, GetSketches):  # of which some are of others
                        assert isinstance(reply, Error)
                        refused[type(question), ErrorCode(reply.code)] += 1
            told, _ = await server.answer(Claimant("", replica.peer), GetSketches(run, step, 0))
            assert isinstance(told, SketchesReply) and told.blocks, "replicas see all"

        async def looked_at(reduce: Reduce, learner: DeviceLearners) -> PeerId:
            if middle.spot_checks.records.of(reduce.run, reduce.step):
                await look(reduce.run, reduce.step)
            return await check(reduce, learner)

        middle.spot_checks.check = looked_at  # type: ignore[method-assign]
        await train(scene, steps=STEPS)
        assert shown
        assert refused.keys() == {(GetMicrobatch, ErrorCode.REFUSED), (Accusation, ErrorCode.REFUSED)}

    in_scenario(tmp_path, test)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e6])
@pytest.mark.parametrize("elements", [1 << 12, 1 << 22])
def test_rounding_of_large_sums_is_no_deviation_and_a_false_addition_is_one(elements: int, scale: float) -> None:
    """Of the additions of six microbatches one is `scale` times the others."""
    generator, seed = torch.Generator().manual_seed(1), bytes(range(16))
    added = [torch.randn(elements, generator=generator) * (scale if number == 2 else 1.0) for number in range(6)]
    sizes_S = sum(gradient_sketch(one_N, seed).abs() for one_N in added)
    assert isinstance(sizes_S, torch.Tensor) and is_finite([sizes_S])
    sums_N = torch.zeros(elements)
    for one_N in added:
        before_S = gradient_sketch(sums_N, seed)
        sums_N += one_N
        told_S, due_S = gradient_sketch(sums_N, seed) - before_S, gradient_sketch(one_N, seed)
        assert max(additions_apart(told_S, due_S, sizes_S)) == 0.0
    largest_S = gradient_sketch(added[2], seed)
    for lie in (-1.0, 1.001, 0.0):
        assert min(additions_apart(lie * largest_S, largest_S, sizes_S)[:-1]) > 1e-4  # the last tile is empty
