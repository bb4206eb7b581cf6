"""Training in float16 learns what float32 does, whatever overflows, and whoever sends it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training import learner as learner_module
from swarmnode.compute.training.device_learners import DeviceLearners
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.passes import FIRST_EXPONENT, GROWTH_PASSES, GradScaler
from swarmnode.compute.training.recomputation import gradient_sketch, recompute
from swarmnode.errors import NotFinite
from tests.compute.training.conftest import LENGTH, SAMPLES, learners, make_run, train
from tests.compute.training.toy import ToySegment, toy_values

Get = Callable[[str], Checkpoint]
MIDDLE = (1, 4)  # layers
CLOSE = 1e-2
HIDDEN = 32
RUN = make_run(autocast=True)


@pytest.fixture
def float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU as a device that is fast at nothing else, for runs that want it."""

    def pretended(_device: torch.device, *, wanted: bool) -> torch.dtype | None:
        return torch.float16 if wanted else None

    monkeypatch.setattr(learner_module, "autocast_dtype", pretended)


def apart(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def middle(checkpoint: Checkpoint, *, autocast: bool = True) -> Learner:
    run = msgspec.structs.replace(RUN, autocast=autocast)
    return Learner(load_segment(checkpoint, *MIDDLE), run)


def normal(seed: int) -> Tensor:
    return torch.randn(SAMPLES, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed))


def there_and_back(learner: Learner, hidden_BTH: Tensor, gradient_BTH: Tensor, index: int = 0) -> tuple[Tensor, Tensor]:
    """The gradient of what came in, and that of the parameters."""
    learner.forward(0, index, *MIDDLE, (hidden_BTH,))
    (came_BTH,) = learner.backward(0, (gradient_BTH,))
    assert came_BTH is not None
    return came_BTH, learner.gradient(learner.blocks).copy()


@pytest.mark.parametrize("kind", ["llama", "gpt2-dropout"])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_curve_is_that_of_float32(kind: str, recompute: bool, checkpoint: Get, float16: None) -> None:
    cuts = (0, 2, 5)
    losses = train(learners(checkpoint(kind), RUN, cuts, recompute=recompute), 4)
    wanted = train(learners(checkpoint(kind), msgspec.structs.replace(RUN, autocast=False), cuts), 4)
    assert losses != wanted and losses == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e-9, 1.0, 1e9, 1e25])
def test_gradients_of_any_size_keep_their_digits(size: float, checkpoint: Get, float16: None) -> None:
    got = there_and_back(middle(checkpoint("llama")), normal(1), size * normal(2))
    wanted = there_and_back(middle(checkpoint("llama"), autocast=False), normal(1), size * normal(2))
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype is torch.float32
        assert (size and apart(ours / (size or 1), theirs / (size or 1)) < CLOSE) or not ours.any()


def test_what_overflows_on_the_way_there_is_computed_in_float32(checkpoint: Get, float16: None) -> None:
    checkpoint_, huge_BTH = checkpoint("gpt2"), 1e6 * normal(1)
    learner, plain = middle(checkpoint_), middle(checkpoint_, autocast=False)
    for one in (learner, plain):
        weight = dict(one.segment.span.model.named_parameters())["transformer.h.0.mlp.c_fc.weight"]  # type: ignore[attr-defined]
        weight.data *= 1e7
    (got,), (wanted,) = (one.forward(0, 0, *MIDDLE, (huge_BTH,)) for one in (learner, plain))
    assert torch.equal(got, wanted)
    (got_back,), (wanted_back,) = (one.backward(0, (normal(2),)) for one in (learner, plain))
    assert got_back is not None and wanted_back is not None and torch.equal(got_back, wanted_back)
    gradients = [one.gradient(one.blocks).copy() for one in (learner, plain)]
    assert torch.equal(*gradients)
    with pytest.raises(NotFinite):
        learner.forward(1, 1, *MIDDLE, (huge_BTH * float("nan"),))


def test_one_who_sends_what_overflows_does_not_spoil_the_next(checkpoint: Get, float16: None) -> None:
    checkpoint_ = checkpoint("llama")
    learner, plain = middle(checkpoint_), middle(checkpoint_, autocast=False)
    (wanted, _) = there_and_back(plain, normal(1), 1e-9 * normal(2))
    wild_BTH, wild_gradient_BTH = 6e4 * torch.ones_like(normal(0)), 1e34 * torch.ones_like(normal(0))
    for _ in range(2 * FIRST_EXPONENT):
        there_and_back(learner, wild_BTH, wild_gradient_BTH)
        learner.discard()
    assert all(scaler.exponent < FIRST_EXPONENT for scaler in learner._passes._scalers.values())
    (got, _) = there_and_back(learner, normal(1), 1e-9 * normal(2), index=1)
    assert apart(got, wanted) < CLOSE


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("recompute", [False, True])
def test_who_sends_what_is_no_number_is_told_and_changes_nothing(
    number: str, recompute: bool, checkpoint: Get, float16: None
) -> None:
    """One element of it, which is looked at with what the first unit back makes of it."""
    learner = Learner(load_segment(checkpoint("llama"), *MIDDLE), RUN, recompute=recompute)
    gradient_BTH = normal(2)
    gradient_BTH[0, 0, 0] = float(number)
    learner.forward(0, 0, *MIDDLE, (normal(1),))
    with pytest.raises(NotFinite, match=f"came back from layer {MIDDLE[1]} is NaN") as told:
        learner.backward(0, (gradient_BTH,))
    assert told.value.unit == MIDDLE[1]
    assert not learner.gradient(learner.blocks).copy().any() and not any(learner.counted.values())
    assert {scaler.exponent for scaler in learner._passes._scalers.values()} == {FIRST_EXPONENT}


@pytest.mark.parametrize("number", ["nan", "inf"])
def test_a_unit_that_masks_hides_nothing(number: str) -> None:
    """Where it does, 0 divided by a scale of 0 would be NaN."""
    x_N = torch.ones(4, requires_grad=True)
    outputs = (torch.where(torch.arange(4) < 3, x_N.half(), torch.zeros(())),)
    scaler, gradient_N = GradScaler(), torch.tensor([1.0, 1.0, 1.0, float(number)])
    assert scaler.gradients(outputs, (gradient_N,), [x_N]) is None
    assert scaler.exponent == FIRST_EXPONENT
    gradient_N[3] = 1.0
    (found,) = scaler.gradients(outputs, (gradient_N,), [x_N]) or (None,)
    assert found is not None and found.tolist() == [1.0, 1.0, 1.0, 0.0]


def steep(factor: float) -> tuple[tuple[Tensor], Tensor]:
    """A float16 output whose gradient is `factor` times what comes in, and its input."""
    x_N = torch.ones(4, requires_grad=True)
    return ((x_N.half() * torch.tensor(factor).half()).half() * torch.tensor(factor).half(),), x_N


def test_a_scale_falls_by_a_half_a_pass_and_rises_again() -> None:
    scaler = GradScaler()
    for fallen in range(1, 4):
        outputs, x_N = steep(100.0)  # 10,000 times what comes in: fits below 65,504 at 4 times alone
        (found,) = scaler.gradients(outputs, (torch.full((4,), 0.75),), [x_N]) or (None,)
        assert found is not None and apart(found, torch.full((4,), 7500.0)) < CLOSE
        assert scaler.exponent == FIRST_EXPONENT - fallen
    for _ in range(GROWTH_PASSES):
        outputs, x_N = steep(0.1)
        assert scaler.gradients(outputs, (torch.ones(4),), [x_N]) is not None
    assert scaler.exponent == FIRST_EXPONENT - 2


def test_a_scale_never_falls_below_one() -> None:
    scaler = GradScaler()
    for _ in range(2 * FIRST_EXPONENT):
        outputs, x_N = steep(300.0)
        assert scaler.gradients(outputs, (torch.ones(4),), [x_N]) is None
    assert scaler.exponent == 0
    outputs, x_N = steep(1.0)
    (found,) = scaler.gradients(outputs, (torch.full((4,), 1e-20),), [x_N]) or (None,)
    assert found is not None and apart(found / 1e-20, torch.ones(4)) < CLOSE


def test_a_replay_adds_nothing(checkpoint: Get, float16: None) -> None:
    learner = middle(checkpoint("llama"))
    first = there_and_back(learner, normal(1), normal(2))
    again = there_and_back(learner, normal(1), normal(2))
    assert torch.equal(first[1], again[1])
    assert apart(again[0], first[0]) < CLOSE


def test_running_statistics_are_kept_and_a_state_goes_to_other_devices(float16: None) -> None:
    """There is nothing of the scale in it."""
    run = make_run(autocast=True, optimizer="adamw")
    learner, plain = Learner(ToySegment(), run), Learner(ToySegment(), make_run(autocast=False))
    for one in (learner, plain):
        one.forward(0, 0, 0, 3, *toy_values(0))
        one.backward(0, ())
        one.commit({}, 1.0)
    for block in learner.blocks:
        assert learner.state(block).keys() == plain.state(block).keys()
        for name, tensor in learner.state(block).items():
            torch.testing.assert_close(tensor, plain.state(block)[name], rtol=CLOSE, atol=CLOSE)
        plain.load(block, learner.state(block))


def test_who_computes_again_finds_the_same_whatever_its_own_device(checkpoint: Get, float16: None) -> None:
    """A spot check: of gradients too small for float16, on a machine that has nothing else."""
    seed = bytes(16)
    learner, checker = middle(checkpoint("llama"), autocast=False), middle(checkpoint("llama"))
    gradient_BTH = 1e-10 * normal(2)
    came_BTH, _ = there_and_back(learner, normal(1), gradient_BTH)
    node = DeviceLearners([checker], checker.segment)
    again = recompute(node, 0, *MIDDLE, (normal(1),), (), (gradient_BTH,), seed)
    assert again.gradients[0] is not None and apart(again.gradients[0], came_BTH) < CLOSE
    sketches = [gradient_sketch(learner.block(number).gradient_N, seed) for number in learner.blocks]
    assert apart(again.sketch_S, torch.cat(sketches)) < CLOSE
    assert not any(checker.counted.values())
