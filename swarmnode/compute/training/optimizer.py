"""AdamW and SGD for the parameters of one block, by torch's fused kernels: one pass over memory, no temporary copies.

Moments of adamw8bit are updated piece by piece (`adamw8bit.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from swarmnode.compute.training.adamw8bit import MOMENT_BYTES, adamw8bit, is_quantized, zero_magnitudes
from swarmnode.swarm.records.run import Run

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
FUSED_DEVICES = ("cpu", "cuda")
ADAMW_SLOTS = ("exp_avg", "exp_avg_sq")
FLOAT_BYTES = 4  # of a parameter


class Optimizer:
    """The update of some parameters and what it remembers of them (AdamW, arXiv 1711.05101; SGD with momentum).

    Weight decay is for tensors of two and more dimensions only, as usual for language models: biases and norms keep
    their size. `slots`: name of the memory ("exp_avg") -> parameter's name -> tensor of its shape; for adamw8bit that of large
    parameters are codes, and there are also the magnitudes of their blocks ("exp_avg_absmax").
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], run: Run) -> None:
        self.run = run
        self.parameters = parameters
        is_adamw8bit = run.optimizer == "adamw8bit"
        self._quantized = {name for name, parameter in parameters.items() if is_adamw8bit and is_quantized(parameter)}
        slots = ADAMW_SLOTS if run.optimizer != "sgd" else ("momentum",) if run.momentum else ()
        self.slots = {slot: {name: self._zeros(name) for name in parameters} for slot in slots}
        for slot in ADAMW_SLOTS if is_adamw8bit else ():
            self.slots[f"{slot}_absmax"] = {name: zero_magnitudes(parameters[name]) for name in sorted(self._quantized)}

    def __repr__(self) -> str:
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        return f"Optimizer({self.run.optimizer}, {elements / 1e6:.1f} M parameters)"

    @torch.no_grad()
    def update(self, step: int) -> None:
        """The update that ends step `step` (from 0), by the parameters' `grad`."""
        decayed = [name for name, parameter in self.parameters.items() if parameter.dim() >= 2]
        others = [name for name, parameter in self.parameters.items() if parameter.dim() < 2]
        for names, weight_decay in ((decayed, self.run.weight_decay), (others, 0.0)):
            exact = [name for name in names if name not in self._quantized]
            if exact:
                self._update_fused(exact, step, weight_decay)
            for name in names:
                if name in self._quantized:
                    self._update_quantized(name, step, weight_decay)

    def _update_fused(self, names: Sequence[str], step: int, weight_decay: float) -> None:
        run = self.run
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        slots = {slot: [tensors[name] for name in names if name in tensors] for slot, tensors in self.slots.items()}
        fused = parameters[0].device.type in FUSED_DEVICES
        if run.optimizer != "sgd":
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

    def _update_quantized(self, name: str, step: int, weight_decay: float) -> None:
        parameter, run = self.parameters[name], self.run
        assert parameter.grad is not None
        adamw8bit(
            parameter.data,
            parameter.grad,
            **{slot: tensors[name] for slot, tensors in self.slots.items()},
            step=step,
            learning_rate=run.learning_rate_at(step),
            betas=run.betas,
            weight_decay=weight_decay,
            epsilon=run.epsilon,
        )

    def _zeros(self, name: str) -> Tensor:
        dtype = torch.uint8 if name in self._quantized else torch.float32
        return torch.zeros_like(self.parameters[name], dtype=dtype, requires_grad=False)


def slots_share(run: Run) -> float:
    """What the optimiser of a run remembers of large parameters, in sizes of their float32."""
    if run.optimizer == "sgd":
        return float(bool(run.momentum))
    return len(ADAMW_SLOTS) * (MOMENT_BYTES / FLOAT_BYTES if run.optimizer == "adamw8bit" else 1.0)


def clip_factor(clip: float, norm: float) -> float:
    """What gradients of this global norm are multiplied by; `clip` 0 is off."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
