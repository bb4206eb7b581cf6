"""The optimisers against torch's own classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from swarmnode.compute.training.optimizer import Optimizer, clip_factor
from swarmnode.swarm.records.run import Run
from tests.compute.training.conftest import make_run


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"bias": (5,), "matrix": (4, 5), "kernel": (2, 3, 3, 3), "scale": ()}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def torch_optimizer(own: dict[str, nn.Parameter], run: Run) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [own["matrix"], own["kernel"]], "weight_decay": run.weight_decay},
        {"params": [own["bias"], own["scale"]], "weight_decay": 0.0},
    ]
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=1.0, betas=run.betas, eps=run.epsilon)
    return torch.optim.SGD(groups, lr=1.0, momentum=run.momentum)


@pytest.mark.parametrize(
    "settings", [{"optimizer": "adamw"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}], ids=str
)
def test_updates_are_those_of_torch(settings: dict[str, Any]) -> None:
    run = make_run(**settings)
    own, theirs = parameters(), parameters()
    optimizer, reference = Optimizer(own, run), torch_optimizer(theirs, run)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in own.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            theirs[name].grad = parameter.grad.clone()
        for group in reference.param_groups:
            group["lr"] = run.learning_rate_at(step)
        optimizer.update(step)
        reference.step()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6)


def test_clip_factor_is_that_of_torch() -> None:
    for clip, scale in ((0.5, 3.0), (2.0, 1e-3)):
        parameter = nn.Parameter(torch.zeros(10))
        gradient = torch.arange(10.0) * scale
        parameter.grad = gradient.clone()
        norm = float(torch.nn.utils.clip_grad_norm_([parameter], clip))
        torch.testing.assert_close(parameter.grad, gradient * clip_factor(clip, norm))
    assert clip_factor(0.0, 1e9) == 1.0
