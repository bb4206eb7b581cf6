"""Muon, Lion and schedule-free AdamW against their authors' formulas, and whether stages compute them as one process does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.training.optimizer import Optimizer, memory_bytes
from swarmnode.compute.training.optimizers.muon import COEFFICIENTS, ITERATIONS, orthogonalize
from swarmnode.compute.training.optimizers.schedule_free import newest_share
from swarmnode.swarm.records.run import Run, check_run
from tests.compute.training.conftest import MICROBATCHES, learners, make_run, pass_through, train

SHAPES = {
    "layer.weight": (6, 10),
    "layer.tall": (9, 4),
    "conv.weight": (4, 2, 3, 3),
    "mlp.experts.gate_up_proj": (3, 4, 5),
    "layer.bias": (6,),
    "norm.weight": (5,),
    "embed_tokens.weight": (7, 5),
    "lm_head.weight": (7, 5),
}
MATRICES = ("layer.weight", "layer.tall", "conv.weight", "mlp.experts.gate_up_proj")
RULES = {
    "muon": {"momentum": 0.95},
    "lion": {"betas": (0.9, 0.99)},
    "schedule-free": {"betas": (0.9, 0.999), "schedule": "constant"},
}
STEPS = 6


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def updated(run: Run, steps: int = STEPS) -> dict[str, nn.Parameter]:
    """The parameters after some steps."""
    own = parameters()
    optimizer = Optimizer(own, run)
    for step in range(steps):
        for name, gradient in gradients(step).items():
            own[name].grad = gradient
        optimizer.update(step)
    return own


def flat(name: str, tensor: Tensor) -> list[Tensor]:
    return list(tensor) if "experts" in name else [tensor.reshape(len(tensor), -1)]


def test_muon_is_that_of_torch_with_products_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", Tensor.clone)
    run = make_run(optimizer="muon", **RULES["muon"])
    own, theirs = updated(run), parameters()
    matrices = {name: [nn.Parameter(one.clone()) for one in flat(name, theirs[name].detach())] for name in MATRICES}
    settings: dict[str, Any] = {"weight_decay": run.weight_decay, "momentum": run.momentum}
    reference = torch.optim.Muon(
        [one for named in matrices.values() for one in named], adjust_lr_fn="match_rms_adamw", **settings
    )
    for step in range(STEPS):
        for name, gradient in gradients(step).items():
            for one, part in zip(matrices.get(name, []), flat(name, gradient), strict=False):
                one.grad = part.clone()
        for group in reference.param_groups:
            group["lr"] = run.learning_rate_at(step)
        reference.step()
    for name, named in matrices.items():
        expected = torch.stack([*named]) if "experts" in name else named[0].view(SHAPES[name])
        torch.testing.assert_close(own[name], expected, rtol=1e-5, atol=1e-5)


def test_muon_leaves_the_rest_to_adamw() -> None:
    muon, adamw = (updated(make_run(optimizer=name, momentum=0.95)) for name in ("muon", "adamw"))
    assert {name for name in SHAPES if torch.equal(muon[name], adamw[name])} == SHAPES.keys() - set(MATRICES)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (4, 4)])
def test_orthogonalize_maps_singular_values_by_the_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    torch.testing.assert_close(orthogonalize(matrix).double(), u @ values.diag() @ v, rtol=1e-4, atol=1e-5)
    assert not orthogonalize(torch.zeros(shape)).any()


def test_lion_is_its_authors() -> None:
    run = make_run(optimizer="lion", **RULES["lion"])
    own, theirs = updated(run), parameters()
    means = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(STEPS):
        rate = run.learning_rate_at(step)
        for name, gradient in gradients(step).items():
            update = torch.sign(means[name] * 0.9 + gradient * 0.1)
            decay = run.treat(name, len(SHAPES[name])).weight_decay
            theirs[name].data -= rate * (update + decay * theirs[name].data)
            means[name] = means[name] * 0.99 + gradient * 0.01
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [STEPS, 40], ids=["all steps: x", "in between: y"])
def test_schedule_free_is_its_authors(steps: int) -> None:
    run = make_run(optimizer="schedule-free", steps=steps, **RULES["schedule-free"])
    own = updated(run)
    beta, beta_sq = run.betas
    for name, start in parameters().items():
        x = z = y = start.detach().double()
        square, total = torch.zeros_like(x), 0.0
        decay = run.treat(name, x.dim()).weight_decay
        for step in range(STEPS):
            rate, gradient = run.learning_rate_at(step), gradients(step)[name].double()
            square = beta_sq * square + (1 - beta_sq) * gradient**2
            z = z - rate * (gradient / ((square / (1 - beta_sq ** (step + 1))).sqrt() + run.epsilon) + decay * y)
            total += rate**2
            x = x + rate**2 / total * (z - x)
            y = (1 - beta) * z + beta * x
        torch.testing.assert_close(own[name].double(), x if steps == STEPS else y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize("schedule", ["constant", "hf-constant"])
def test_the_newest_share_is_that_of_squared_rates(schedule: str, warmup: int) -> None:
    from swarmnode.swarm.records.recipe import Recipe

    run = make_run(optimizer="schedule-free", schedule="recipe", recipe=Recipe(schedule), warmup_steps=warmup)
    check_run(run)
    total = 0.0
    for step in range(8):
        total += run.learning_rate_at(step) ** 2
        expected = run.learning_rate_at(step) ** 2 / total if total else 0.0
        assert math.isclose(newest_share(run, step), expected, rel_tol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_memory_is_what_was_estimated(name: str) -> None:
    run = make_run(optimizer=name, **RULES[name])
    optimizer = Optimizer(parameters(), run)
    slots = [tensor for named in optimizer.slots.values() for tensor in named.values()]
    assert memory_bytes(run, parameters()) == sum(tensor.nbytes for tensor in slots)
    assert optimizer.working_bytes > 0


@pytest.mark.parametrize("name", RULES)
def test_stages_and_heirs_compute_what_one_process_does(checkpoint: Callable[[str], Checkpoint], name: str) -> None:
    run = make_run(optimizer=name, learning_rate=3e-3, **RULES[name])
    (whole,) = chain = learners(checkpoint("gpt2"), run, (0, 5))
    alone = train(chain, STEPS)
    stages = learners(checkpoint("gpt2"), run, (0, 2, 5))
    losses = train(stages, 2)
    for index in range(MICROBATCHES):  # a step that is not committed leaves no trace
        pass_through(stages, index)
    heirs = learners(checkpoint("gpt2"), run, (0, 2, 5))
    for stage, heir in zip(stages, heirs, strict=True):
        for block in stage.blocks:
            heir.load(block, stage.state(block))
        heir.step = stage.step
    losses += train(heirs, STEPS - 2)
    assert losses == pytest.approx(alone, rel=1e-5)
    assert losses[-1] != losses[0]
    assert whole.step == heirs[0].step
