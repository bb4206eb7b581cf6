"""AdamW with moments of 8 bits: the loss curve of float32's, bitsandbytes' own update, and what breaks it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training import optimizer as adamw8bit
from swarmnode.compute.training.learner import Learner
from swarmnode.compute.training.lm import load_segment
from swarmnode.compute.training.optimizer import BLOCK, Optimizer, dequantize, dynamic_map, quantize
from swarmnode.errors import CheckpointError
from tests.compute.training.conftest import make_run
from tests.llama import save_llama

LAYERS, HIDDEN = 2, 64
VOCABULARY, SAMPLES, LENGTH = 97, 8, 16
STEPS = 60


def optimizer_of(parameters: dict[str, nn.Parameter], **changes: Any) -> Optimizer:
    return Optimizer(parameters, make_run(**{"optimizer": "adamw8bit", "warmup_steps": 0, **changes}))


def step(optimizer: Optimizer, number: int, gradients: dict[str, Tensor]) -> None:
    for name, gradient in gradients.items():
        optimizer.parameters[name].grad = gradient.clone()
    optimizer.update(number)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Every matrix of it is large enough for 8 bits."""
    path: Path = tmp_path_factory.mktemp("models") / "llama"
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_key_value_heads": 4}
    save_llama(path, layers=LAYERS, vocab_size=VOCABULARY, **sizes)
    return Checkpoint(path)


def learner_of(llama: Checkpoint, optimizer: str) -> Learner:
    run = make_run(
        optimizer=optimizer, steps=STEPS, batch=SAMPLES, microbatch=SAMPLES, sequence=LENGTH, learning_rate=3e-3
    )
    return Learner(load_segment(llama, 0, LAYERS + 2), run)


def one_step(learner: Learner) -> float:
    """On rows that count on by a step of their own, with a tenth of noise that nobody can learn; its loss."""
    generator = torch.Generator().manual_seed(learner.step)
    start_B1, stride_B1 = torch.randint(1, 8, (2, SAMPLES, 1), generator=generator)
    ids_BT = (start_B1 + stride_B1 * torch.arange(LENGTH)) % VOCABULARY
    noise_BT = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    ids_BT = torch.where(torch.rand(ids_BT.shape, generator=generator) < 0.1, noise_BT, ids_BT)
    (loss,) = learner.forward(0, 0, 0, LAYERS + 2, (ids_BT,), (ids_BT,))
    learner.backward(0, ())
    learner.commit({}, learner.squared_norm(learner.blocks) ** 0.5)
    return float(loss)


def test_the_loss_stays_within_a_hundredth_of_float32s(llama: Checkpoint) -> None:
    curves = []
    for name in ("adamw", "adamw8bit"):
        learner = learner_of(llama, name)
        curves.append([one_step(learner) for _ in range(STEPS)])
    exact, quantized = curves
    assert exact[-1] < 0.7 * exact[0], "something is learnt"
    assert quantized != exact
    assert quantized == pytest.approx(exact, rel=0.01)


def test_a_state_takes_a_quarter_and_goes_on_bit_for_bit(llama: Checkpoint) -> None:
    learner, exact = learner_of(llama, "adamw8bit"), learner_of(llama, "adamw")
    assert learner.optimizer_bytes < 0.27 * exact.optimizer_bytes
    for _ in range(3):
        one_step(learner)
    heir = learner_of(llama, "adamw8bit")
    for block in learner.blocks:
        heir.load(block, learner.state(block))
    heir.step = learner.step
    assert [one_step(heir) for _ in range(3)] == [one_step(learner) for _ in range(3)]


def test_a_state_in_another_dtype_changes_nothing(llama: Checkpoint) -> None:
    learner = learner_of(llama, "adamw8bit")
    one_step(learner)
    before = {name: tensor.clone() for name, tensor in learner.state(1).items()}
    codes = min(name for name, tensor in before.items() if tensor.dtype == torch.uint8)
    with pytest.raises(CheckpointError, match=r"torch.float32, not torch.uint8"):
        learner.load(1, {name: torch.ones_like(t, dtype=torch.float32) for name, t in before.items()})
    assert torch.equal(learner.state(1)[codes], before[codes])


def test_it_is_the_update_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    for levels, signed in zip(maps, (True, False), strict=True):
        torch.testing.assert_close(torch.tensor(dynamic_map(signed=signed)), levels, rtol=1e-6, atol=0)
    shape, blocks = (70, 100), 28  # the last block is not full
    generator = torch.Generator().manual_seed(0)
    own = nn.Parameter(torch.randn(shape, generator=generator))
    theirs = own.detach().clone()
    optimizer = optimizer_of({"weight": own})
    run = optimizer.run
    codes = [torch.zeros(shape, dtype=torch.uint8) for _ in maps]
    absmax = [torch.zeros(blocks) for _ in maps]
    for number in range(8):
        gradient = torch.randn(shape, generator=generator)
        step(optimizer, number, {"weight": gradient})
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            *("adam", gradient, theirs, *codes, *run.betas, 0.0, 0.0, run.epsilon, number + 1),
            *(run.learning_rate_at(number), *maps, *absmax, run.weight_decay, 1.0, False),
        )
    change = (own - theirs).norm() / (8 * run.learning_rate * own.numel() ** 0.5)
    assert change < 0.02, "they round to the nearest level, too, from one digit more"


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.randn(5003, generator=generator))
        optimizer = optimizer_of({"bias": parameter})
        for number in range(4):
            step(optimizer, number, {"bias": torch.randn(5003, generator=generator)})
        return [parameter.detach(), *(named["bias"] for named in optimizer.slots.values())]

    whole = trained()
    monkeypatch.setattr(adamw8bit, "CPU_PIECE", 3 * BLOCK)
    for one, other in zip(trained(), whole, strict=True):
        assert torch.equal(one, other)


def test_small_gradients_beside_large_ones_make_no_jumps() -> None:
    """As in an embedding: a row is met once, and then not for long. Rounded to zero, a square leaves epsilon to divide by."""
    parameter = nn.Parameter(torch.zeros(16, BLOCK))
    optimizer = optimizer_of({"embedding": parameter}, weight_decay=0.0, schedule="constant", learning_rate=1e-3)
    gradient = torch.logspace(-9, 0, BLOCK).expand(16, BLOCK)
    step(optimizer, 0, {"embedding": gradient})
    for number in range(1, 6):
        before = parameter.detach().clone()
        step(optimizer, number, {"embedding": torch.zeros_like(gradient)})
        assert (parameter - before).abs().max() < 1.5e-3


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e25], ids=["zero", "tiny", "huge"])
def test_gradients_of_any_size_leave_finite_numbers(size: float) -> None:
    parameter = nn.Parameter(torch.ones(64, 64))
    optimizer = optimizer_of({"weight": parameter})
    for number in range(3):
        step(optimizer, number, {"weight": torch.full((64, 64), size)})
        step(optimizer, number, {"weight": torch.zeros(64, 64)})
    assert bool(parameter.isfinite().all())


def test_levels_come_back_as_they_went() -> None:
    for signed in (True, False):
        levels_N = torch.tensor(dynamic_map(signed=signed))[0 if signed else 1 :]
        moment_N = torch.cat([levels_N, torch.ones(1)])[:BLOCK] * 3.0
        codes_N, absmax_G = torch.zeros(len(moment_N), dtype=torch.uint8), torch.zeros(1)
        quantize(moment_N, codes_N, absmax_G, signed=signed)
        torch.testing.assert_close(dequantize(codes_N, absmax_G, signed=signed), moment_N, rtol=1e-6, atol=0)
