"""NaN and infinity that one peer sends: who sent them is left alone, the others train on. In virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn import functional

from swarmnode.codec.frames import Frame, FrameKind
from swarmnode.codec.messages import decode_body, encode_body
from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode_values, encode, payload_of
from swarmnode.compute.training.datasets.batches import ArrayBatches, Batches, Microbatch
from swarmnode.compute.training.segment import Values
from swarmnode.errors import NotFinite
from swarmnode.swarm.records.run import Averaging, Compression, Run
from tests.compute.training.toy import CLASSES, FEATURES, ToySegment
from tests.peer import training_swarm
from tests.peer.training_swarm import toy_run, until
from tests.training.sabotage import Ill, Saboteur
from tests.training.test_hangs import STEPS, Scenario, in_scenario

PAIRS = (0, 0, 1, 1, 2, 2)
LATE = 20  # frames: in the middle of a step
LIAR = 3  # of the middle unit: activations go on from it, and gradients back


class Sender(Saboteur):
    """Sends values of one number, or its own times a factor, in frames of this kind, in the codec of the run."""

    def __init__(
        self,
        kind: FrameKind,
        number: float = math.nan,
        *,
        factor: float | None = None,
        after: int = LATE,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(Ill.PINGS, after)
        self._kind = kind
        self._number = number
        self._factor = factor
        self._codec = codec  # instead of the run's
        self.lies = 0

    def _lie(self, sent: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sent, self._number) if self._factor is None else sent * self._factor

    def instead_of(self, frame: Frame) -> Frame | None:
        if not self.tripped or frame.kind != self._kind or not frame.payload:
            return frame
        self.lies += 1
        return self._instead(frame)

    def _instead(self, frame: Frame) -> Frame:
        body: Any = decode_body(frame.kind, frame.body)
        values = decode_values(body.values, frame.payload, "cpu")
        pairs = [
            (self._lie(value.flatten()).view(info.shape), info) for value, info in zip(values, body.values, strict=True)
        ]
        encoded = [
            encode(value, Codec(info.codec) if self._codec is None else self._codec, param=info.param)
            for value, info in pairs
        ]
        body = msgspec.structs.replace(body, values=tuple(info for info, _ in encoded))
        payload = payload_of([payload for _, payload in encoded])
        return msgspec.structs.replace(frame, body=encode_body(body), payload=payload)


class OneNumber(Sender):
    """Sends one number among its own values."""

    def _lie(self, sent: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tensor([self._number]), sent[1:]])


class OtherSize(Sender):
    """Sends payloads of `factor` times the size under the descriptors of the whole."""

    def _instead(self, frame: Frame) -> Frame:
        assert self._factor is not None
        sent = bytes(frame.payload)
        return msgspec.structs.replace(frame, payload=(2 * sent)[: int(len(sent) * self._factor)])


WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    **{rule: {"compression": Compression(rule)} for rule in ("bf16", "int8", "int4")},
    "topk": {"compression": Compression("topk", 3.0, feedback=True)},
    "PowerSGD": {"averaging": Averaging(rank=1)},
    "sums in fp16": {"averaging": Averaging(codec=Codec.FP16)},
}
"""Settings of runs by their codecs."""

FORWARD, BACKWARD = FrameKind.FORWARD, FrameKind.BACKWARD
PLACES = [(1, FORWARD), (LIAR, FORWARD), (LIAR, BACKWARD), (5, BACKWARD)]  # volunteer of the first to the last unit
LIES: dict[str, Callable[..., Sender]] = {
    **{f"{number:.0e}": partial(OneNumber, number=number) for number in (3e38, -1e30, 1e25)},
    "1e5 in fp16": partial(OneNumber, number=1e5, codec=Codec.FP16),
    **{f"{factor} of the size": partial(OtherSize, factor=factor) for factor in (0.5, 2, 0.9)},
}
MIXED = list(zip(product(LIES, PLACES), cycle(WAYS), strict=False))
"""Each lie at each place, in one codec after another."""


@pytest.mark.parametrize(
    ("lie", "number", "kind", "way"),
    [(lie, *place, way) for (lie, place), way in MIXED],
    ids=[f"{lie} by {number} {kind.name} {way}" for (lie, (number, kind)), way in MIXED],
)
def test_one_number_or_another_size_does_not_stop_the_others(
    tmp_path: Path, lie: str, number: int, kind: FrameKind, way: str
) -> None:
    sender = LIES[lie](kind)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, WAYS[way], **{f"peer_{number}": sender})
    assert 0 < sender.lies < 10, "the two suspects are kept apart, so that claims soon tell which of them lies"


class Plain(ToySegment):
    """The toy model without a norm: before each unit of `at` comes `operation`."""

    at: tuple[int, ...] = ()
    operation: Callable[[torch.Tensor], torch.Tensor] = torch.abs

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.modules[1] = torch.nn.Linear(FEATURES, FEATURES)

    def buffers(self) -> dict[int, dict[str, torch.Tensor]]:
        return {}

    def forward(self, values: Values, start: int, end: int, seed: int, labels: Values = ()) -> Values:
        for unit in range(start, end):
            come = tuple(map(Plain.operation, values)) if unit in self.at else values
            values = super().forward(come, unit, unit + 1, seed, labels if unit == self.units - 1 else ())
        return values


def half_exp(x: torch.Tensor) -> torch.Tensor:
    return (x / 2).exp()


def fifth_power(x: torch.Tensor) -> torch.Tensor:
    return x**5 / 100


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(training_swarm, "ToySegment", Plain)
    monkeypatch.setattr(training_swarm, "_LOCAL_LOSSES", {})
    return monkeypatch


WITHIN = [  # the bound; the honest stage behind, or the one behind that, overflows
    (1, FORWARD, 1e3, (1,), half_exp),
    (1, FORWARD, -1e8, (2,), fifth_power),
    (LIAR, FORWARD, 1e3, (2,), half_exp),
    (LIAR, FORWARD, 4e9, (1, 2), fifth_power),
    (LIAR, BACKWARD, 4e9, (1, 2), fifth_power),
    (5, BACKWARD, 4e9, (1,), fifth_power),
    (5, BACKWARD, 4e9, (), None),  # the toy model with its norm, which makes gradients larger
]


@pytest.mark.parametrize(("number", "kind", "value", "at", "operation"), WITHIN)
def test_numbers_within_the_bound_that_overflow_at_an_honest_stage_stop_nobody(
    tmp_path: Path, plain: pytest.MonkeyPatch, number: int, kind: FrameKind, value: float, at: Any, operation: Any
) -> None:
    """Those that overflow nowhere change the losses: they are the spot checks' to find."""
    plain.setattr(training_swarm, "ToySegment", Plain if operation else ToySegment)
    plain.setattr(Plain, "at", at)
    plain.setattr(Plain, "operation", operation)
    sender = OneNumber(kind, value)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        with contextlib.suppress(AssertionError):
            await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, **{f"peer_{number}": sender})
    assert 0 < sender.lies < 20


@pytest.mark.parametrize(("number", "kind"), [(0, FORWARD), (1, FORWARD), (1, BACKWARD), (2, BACKWARD)])
@pytest.mark.parametrize("value", [3e38, 1e3])
def test_without_replicas_the_run_ends_after_two_tries(
    tmp_path: Path, plain: pytest.MonkeyPatch, number: int, kind: FrameKind, value: float
) -> None:
    plain.setattr(Plain, "at", (1, 2) if value == 1e3 else ())
    plain.setattr(Plain, "operation", half_exp)
    sender = OneNumber(kind, value)

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        if value == 3e38 or kind == FORWARD:
            with pytest.raises(NotFinite, match="let another one hold the same layers"):
                await scene.train()

    in_scenario(tmp_path, test, **{f"peer_{number}": sender})
    assert sender.lies < 10


class HugeLoss(Sender):
    """Returns gradients with a loss of no reason."""

    def _instead(self, frame: Frame) -> Frame:
        body = msgspec.structs.replace(decode_body(frame.kind, frame.body), loss=self._number)
        return msgspec.structs.replace(frame, body=encode_body(body))


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, math.nan])
def test_a_loss_of_no_reason_stops_nobody(tmp_path: Path, loss: float) -> None:
    """The sum of two such losses is no float64, which ended the coordinator."""
    sender = HugeLoss(BACKWARD, loss)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, peer_5=sender)
    assert 0 < sender.lies < 10


def test_gradients_that_the_averaging_cannot_carry_are_not_counted(tmp_path: Path, plain: pytest.MonkeyPatch) -> None:
    """They are finite in the honest stage, and infinite once they are sent as float16."""
    sender = OneNumber(FORWARD, 1e7)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        with contextlib.suppress(AssertionError):
            await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, WAYS["sums in fp16"], **{f"peer_{LIAR}": sender})
    assert 0 < sender.lies < 20


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [FrameKind.FORWARD, FrameKind.BACKWARD], ids=["activations", "gradients"])
def test_the_others_train_on(tmp_path: Path, kind: FrameKind, number: float) -> None:
    """It ended the run and blamed the honest stage behind, or had the microbatch tried 580 times in 5 s."""
    sender = Sender(kind, number)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, **{f"peer_{LIAR}": sender})
    assert 0 < sender.lies < 40


@pytest.mark.parametrize("kind", [FrameKind.FORWARD, FrameKind.BACKWARD], ids=["activations", "gradients"])
def test_where_nobody_else_has_the_unit_the_run_ends_after_a_pause(tmp_path: Path, kind: FrameKind) -> None:
    sender = Sender(kind)

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        with pytest.raises(NotFinite):
            await scene.train()

    in_scenario(tmp_path, test, peer_1=sender)
    assert 1 < sender.lies < 40


def test_values_out_of_all_reason_are_put_down_to_who_made_them(tmp_path: Path) -> None:
    """They overflow in the honest stage behind, which says that it met NaN: on one route only."""
    sender = Sender(FrameKind.FORWARD, 3e38)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        await scene.train()
        assert len(scene.losses) == STEPS

    in_scenario(tmp_path, test, **{f"peer_{LIAR}": sender})
    assert sender.lies


@pytest.mark.parametrize("number", [math.nan, 3e38, 1e19])
def test_a_trainer_that_sends_nan_or_huge_numbers_does_not_stop_another_one(tmp_path: Path, number: float) -> None:
    sender = Sender(FrameKind.FORWARD, number, after=8)

    async def test(scene: Scenario) -> None:
        await scene.join(*PAIRS)
        _, false = await scene.swarm.trainer(scene.run, scene.batches, lambda _report: None)
        feeding = asyncio.ensure_future(false.train(asyncio.Event()))
        await until(lambda: sender.lies > 0, "it feeds")
        await scene.train()
        assert len(scene.losses) == STEPS
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)

    in_scenario(tmp_path, test, peer_6=sender)
    assert sender.lies


class WithNan(Batches):
    """Data of which the inputs are NaN."""

    def __init__(self, batches: Batches) -> None:
        self.fingerprint = batches.fingerprint
        self._batches = batches

    def samples(self, run: Run) -> int:
        return self._batches.samples(run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        inputs, labels = self._batches.rows(numbers, run)
        return Microbatch(tuple(torch.full_like(value, math.nan) for value in inputs), labels)


def test_a_trainer_whose_data_hold_nan_is_told_so(tmp_path: Path) -> None:
    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        with pytest.raises(NotFinite, match="the data hold NaN"):
            await scene.train(WithNan(scene.batches))

    in_scenario(tmp_path, test)


class Regression(ToySegment):
    """The toy model with a loss on float labels."""

    def forward(self, values: Values, start: int, end: int, seed: int, labels: Values = ()) -> Values:  # type: ignore[override]
        if end < self.units:
            return super().forward(values, start, end, seed)
        (x,) = super().forward(values, start, end - 1, seed) if start < end - 1 else values
        (due,) = labels
        return (functional.mse_loss(self.modules[2](x), due),)


def float_batches(false: float | None = None, row: int = 5) -> ArrayBatches:
    """Data with float labels, of which one is `false`."""
    dice = np.random.default_rng(0)
    x, labels = (dice.normal(size=(48, width)).astype(np.float32) for width in (FEATURES, CLASSES))
    if false is not None:
        labels[row, 1] = false
    return ArrayBatches({"x": x, "labels": labels}, ["x"], ["labels"])


class SaidToBe(Batches):
    """Data under the fingerprint of others."""

    def __init__(self, batches: Batches, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint
        self._batches = batches
        self.fed = 0

    def samples(self, run: Run) -> int:
        return self._batches.samples(run)

    def rows(self, numbers: list[int], run: Run) -> Microbatch:
        self.fed += 1
        return self._batches.rows(numbers, run)


@pytest.fixture
def regression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_swarm, "ToySegment", Regression)
    monkeypatch.setattr(training_swarm, "_LOCAL_LOSSES", {})


@pytest.mark.usefixtures("regression")
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize("units", [(0, 1, 2), PAIRS], ids=["one holder each", "two"])
def test_a_trainer_whose_float_labels_hold_nan_or_infinity_is_told_so(
    tmp_path: Path, number: float, units: tuple[int, ...]
) -> None:
    """At once: no stage is blamed, and the microbatch is not tried again and again."""

    async def test(scene: Scenario) -> None:
        scene.batches = float_batches(number)
        scene.run = toy_run(scene.batches, STEPS)
        await scene.join(*units)
        false = SaidToBe(scene.batches, scene.batches.fingerprint)
        with pytest.raises(NotFinite, match="the labels hold NaN or infinity; check the dataset"):
            await scene.train(false)
        assert false.fed <= 2 * scene.run.microbatches
        assert not any(volunteer.standing.shunned for volunteer in scene.swarm.volunteers)
        assert not any(volunteer.peer in text for volunteer in scene.swarm.volunteers for text in scene.waits)

    in_scenario(tmp_path, test)


@pytest.mark.usefixtures("regression")
@pytest.mark.parametrize("number", [math.nan, math.inf, 1e30, -3e38])
def test_float_labels_of_one_trainer_do_not_stop_another_one(tmp_path: Path, number: float) -> None:
    async def test(scene: Scenario) -> None:
        scene.batches = float_batches()
        scene.run = toy_run(scene.batches, STEPS)
        await scene.join(*PAIRS)
        false = SaidToBe(float_batches(number), scene.batches.fingerprint)
        _, trainer = await scene.swarm.trainer(scene.run, false, lambda _report: None)
        feeding = asyncio.ensure_future(trainer.train(asyncio.Event()))
        await scene.train()
        assert len(scene.losses) == STEPS
        (ended,) = await asyncio.gather(feeding, return_exceptions=True)
        assert isinstance(ended, NotFinite | int)
        assert not any(volunteer.peer in text for volunteer in scene.swarm.volunteers for text in scene.waits)

    in_scenario(tmp_path, test)


@pytest.mark.parametrize("spoil", [lambda name, one: (name, one * math.nan), lambda name, one: (f"{name}_", one)])
def test_a_state_that_cannot_be_loaded_names_its_holder_and_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]
) -> None:
    """A newcomer that fetches it goes on trying, and says from whom it has it."""

    async def test(scene: Scenario) -> None:
        await scene.join(0, 1, 2)
        holder, joining = scene.swarm.volunteers[1], []

        def spoil_states(step: int) -> None:
            learner = holder.stage.state.learner
            copy_state = learner.copy_state
            learner.copy_state = lambda: {  # type: ignore[method-assign]
                block: dict(spoil(name, one.float()) for name, one in tensors.items())
                for block, tensors in copy_state().items()
            }
            if step == 0:
                joining.append(asyncio.ensure_future(scene.join(1)))

        scene.on_step = spoil_states
        await scene.train()
        await asyncio.gather(*joining)
        await until(lambda: "the state that" in caplog.text, "it is told")
        assert f"the state that {holder.peer} gave: " in caplog.text
        assert not scene.swarm.volunteers[3].ready

    in_scenario(tmp_path, test)
