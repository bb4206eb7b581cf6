"""AdamW and SGD for the parameters of one block, by torch's fused kernels: one pass over memory, no temporary copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from swarmnode.swarm.records.run import Run

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
FUSED_DEVICES = ("cpu", "cuda")


class Optimizer:
    """The update of some parameters and what it remembers of them (AdamW, arXiv 1711.05101; SGD with momentum).

    Weight decay is for tensors of two and more dimensions only, as usual for language models: biases and norms keep
    their size. `slots`: name of the memory ("exp_avg") -> parameter's name -> tensor of its shape.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], run: Run) -> None:
        self.run = run
        self.parameters = parameters
        slots = ("exp_avg", "exp_avg_sq") if run.optimizer == "adamw" else ("momentum",) if run.momentum else ()
        self.slots: dict[str, dict[str, Tensor]] = {
            slot: {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in parameters.items()}
            for slot in slots
        }

    def __repr__(self) -> str:
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        return f"Optimizer({self.run.optimizer}, {elements / 1e6:.1f} M parameters)"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """The update that ends step `step` (from 0), by the parameters' `grad`."""
        decayed = [name for name, parameter in self.parameters.items() if parameter.dim() >= 2]
        others = [name for name, parameter in self.parameters.items() if parameter.dim() < 2]
        for names, weight_decay in ((decayed, self.run.weight_decay), (others, 0.0)):
            if names:
                self._update(names, step, weight_decay)

    def _update(self, names: Sequence[str], step: int, weight_decay: float) -> None:
        run = self.run
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        slots = {slot: [tensors[name] for name in names] for slot, tensors in self.slots.items()}
        fused = parameters[0].device.type in FUSED_DEVICES
        if run.optimizer == "adamw":
            adamw(
                parameters,
                gradients,
                slots["exp_avg"],
                slots["exp_avg_sq"],
                [],
                [torch.full((), float(step), device=parameter.device) for parameter in parameters],  # counted up by one
                foreach=False,
                fused=fused,
                amsgrad=False,
                beta1=run.betas[0],
                beta2=run.betas[1],
                lr=run.learning_rate_at(step),
                weight_decay=weight_decay,
                eps=run.epsilon,
                maximize=False,
            )
            return
        sgd(
            parameters,
            gradients,
            list(slots.get("momentum", [None] * len(names))),
            foreach=False,
            fused=fused,
            weight_decay=weight_decay,
            momentum=run.momentum,
            lr=run.learning_rate_at(step),
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


def clip_factor(clip: float, norm: float) -> float:
    """What gradients of this global norm are multiplied by; `clip` 0 is off."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
