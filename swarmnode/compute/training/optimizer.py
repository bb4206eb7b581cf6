"""Optimisers of the parameters of one block: AdamW and SGD by torch's fused kernels (one pass over memory, no temporary copies),
and the rules of `optimizers`.

The moments of adamw8bit are 8-bit codes in blocks of 256 (arXiv 2110.02861), updated piece by piece.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from swarmnode.compress.blockwise import rows_of
from swarmnode.compute.training import update_rules
from swarmnode.compute.training.update_rules import is_matrix, lion, muon, schedule_free
from swarmnode.compute.training.update_rules import working_bytes as muon_bytes
from swarmnode.swarm.records.run import Run, Treatment

CLIP_EPSILON = 1e-6  # that of torch.nn.utils.clip_grad_norm_
FUSED_DEVICES = ("cpu", "cuda")
FUSED = ("adamw", "sgd", "eva")  # optimisers whose kernels take all parameters at once
ADAMW_SLOTS = ("exp_avg", "exp_avg_sq")
SLOTS = {
    "adamw": ADAMW_SLOTS,
    "adamw8bit": ADAMW_SLOTS,
    "muon": ("momentum",),
    "lion": ("exp_avg",),
    "schedule-free": ("exp_avg_sq", "z_minus_y"),
}
EVA_MEANS = ("input_mean", "output_mean")
FLOAT_BYTES = 4  # of a parameter
BLOCK = 256
MIN_ELEMENTS = 4096  # smaller tensors (biases, norms) save too little for the error
MOMENT_BYTES = 1 + 4 / BLOCK  # per element
DECADES = 7  # of the dynamic map
CPU_PIECE, CARD_PIECE = 1 << 18, 1 << 21  # elements at once: fit a cache, and a node's reserve of card memory
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def is_quantized(parameter: Tensor) -> bool:
    """Return whether adamw8bit keeps the moments of this parameter in 8 bits."""
    return parameter.numel() >= MIN_ELEMENTS


def zero_magnitudes(parameter: Tensor) -> Tensor:
    """Return the initial magnitudes float32_G of the parameter's blocks: with zeros, moments are zero whatever their codes."""
    return torch.zeros(-(-parameter.numel() // BLOCK), device=parameter.device)


def update_adamw(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    exp_avg: Sequence[Tensor],
    exp_avg_sq: Sequence[Tensor],
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
) -> None:
    """Update float32 parameters and their moments in place by AdamW (arXiv 1711.05101), at the end of step `step` (from 0)."""
    adamw(
        list(parameters),
        list(gradients),
        list(exp_avg),
        list(exp_avg_sq),
        [],
        [torch.full((), float(step), device=parameter.device) for parameter in parameters],  # counted up by one
        foreach=False,
        fused=parameters[0].device.type in FUSED_DEVICES,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=epsilon,
        maximize=False,
    )


def adamw8bit(
    parameter: Tensor,
    gradient: Tensor,
    *,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    exp_avg_absmax: Tensor,
    exp_avg_sq_absmax: Tensor,
    step: int,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
    epsilon: float,
) -> None:
    """Update one contiguous parameter in place, at the end of step `step` (from 0). The unrounded moments decide the update.

    `exp_avg` and `exp_avg_sq` are uint8 codes of its shape. `exp_avg_absmax` and `exp_avg_sq_absmax` are their blocks' magnitudes
    float32_G.
    """
    size = CPU_PIECE if parameter.device.type == "cpu" else CARD_PIECE
    correction, correction_sq = (1 - beta ** (step + 1) for beta in betas)
    elements = (tensor.view(-1).split(size) for tensor in (parameter, gradient, exp_avg, exp_avg_sq))
    magnitudes = (tensor.split(size // BLOCK) for tensor in (exp_avg_absmax, exp_avg_sq_absmax))
    for parameter_N, gradient_N, mean_N, square_N, mean_G, square_G in zip(*elements, *magnitudes, strict=True):
        moment_N = dequantize(mean_N, mean_G, signed=True).mul_(betas[0]).add_(gradient_N * (1 - betas[0]))
        quantize(moment_N, mean_N, mean_G, signed=True)
        moment_sq_N = dequantize(square_N, square_G, signed=False).mul_(betas[1])
        moment_sq_N.add_((gradient_N * gradient_N).mul_(1 - betas[1]))
        quantize(moment_sq_N, square_N, square_G, signed=False)
        divisor_N = moment_sq_N.sqrt_().div_(math.sqrt(correction_sq)).add_(epsilon)
        parameter_N.mul_(1 - learning_rate * weight_decay).sub_(
            moment_N.div_(divisor_N).mul_(learning_rate / correction)
        )


def quantize(moment_N: Tensor, codes_N: Tensor, absmax_G: Tensor, *, signed: bool) -> None:
    """Write codes and magnitudes of a moment. Infinite values become the largest number."""
    moment_GW = rows_of(moment_N, BLOCK)
    absmax_G.copy_(moment_GW.abs().amax(1).clamp_(SMALLEST, LARGEST))
    share_N = (moment_GW / absmax_G.unsqueeze(1)).view(-1)[: len(codes_N)]
    bits_N = share_N.half().view(torch.int16).int().add_(1 << 15)
    codes_N.copy_(_codes_by_bits(codes_N.device, signed).index_select(0, bits_N))


def dequantize(codes_N: Tensor, absmax_G: Tensor, *, signed: bool) -> Tensor:
    """Return the optimiser's moment_N in float32 from 8-bit `codes_N` and the largest magnitude `absmax_G` of each block.
    `signed`: the codes include negative values."""
    moment_N = _levels(codes_N.device, signed).index_select(0, codes_N.int())
    return rows_of(moment_N, BLOCK).mul_(absmax_G.unsqueeze(1)).view(-1)[: len(codes_N)]


def dynamic_map(*, signed: bool) -> list[float]:
    """Return the 256 levels of the codes in order, from 0 to 1; signed from -0.993 to 1. Each decade has twice as many as the
    next smaller one."""
    levels = [0.0, 1.0]
    for decade in range(DECADES):
        count = (1 if signed else 2) << decade
        unit = 10 ** (DECADES - 1 - decade)
        magnitudes = [(0.1 + 0.9 * (place + 0.5) / count) / unit for place in range(count)]
        levels += magnitudes + ([-magnitude for magnitude in magnitudes] if signed else [])
    return sorted(levels)


@cache
def _levels(device: torch.device, signed: bool) -> Tensor:
    return torch.tensor(dynamic_map(signed=signed), device=device)


@cache
def _codes_by_bits(device: torch.device, signed: bool) -> Tensor:
    """Return a table of the nearest level's code for each float16 value; its index is the value's bits as an int16, plus 2**15.

    Squares are not rounded down to zero: the first moment would then be divided by epsilon alone, a thousandfold update.
    """
    shares_N = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float().nan_to_num_(0.0)
    levels_L = _levels(torch.device("cpu"), signed)
    codes_N = torch.bucketize(shares_N, (levels_L[1:] + levels_L[:-1]) / 2).clamp_(min=0 if signed else 1)
    return codes_N.to(device, torch.uint8)


class Optimizer:
    """Optimiser of some parameters, with its memory (AdamW, arXiv 1711.05101; SGD with momentum; and the rules of `optimizers`).

    `run.treat` gives each parameter its rate and weight decay; frozen ones have no memory. `slots` holds for each memory
    ("exp_avg") the parameters' tensors by name, of their shapes. With adamw8bit those of large parameters are codes, and further
    slots hold the magnitudes of their blocks ("exp_avg_absmax").
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], run: Run) -> None:
        self.run = run
        treatments = {name: run.treat(name, parameter.dim()) for name, parameter in parameters.items()}
        self.parameters = {name: one for name, one in parameters.items() if not treatments[name].frozen}
        self._rules = {name: rule_of(run, name, parameter) for name, parameter in self.parameters.items()}
        self._groups: dict[tuple[str, Treatment], list[str]] = {}  # names by how they are updated, in order
        self.slots: dict[str, dict[str, Tensor]] = {}
        for name, rule in self._rules.items():
            self._groups.setdefault((rule, treatments[name]), []).append(name)
            for slot in slots_of(rule, run):
                dtype = torch.uint8 if self._rules[name] == "adamw8bit" else torch.float32
                self.slots.setdefault(slot, {})[name] = torch.zeros_like(
                    self.parameters[name], dtype=dtype, requires_grad=False
                )
                if rule == "adamw8bit":
                    self.slots.setdefault(f"{slot}_absmax", {})[name] = zero_magnitudes(self.parameters[name])

            if rule == "eva":
                for slot, shape in zip(EVA_MEANS, update_rules.shapes_of(self.parameters[name]), strict=True):
                    self.slots.setdefault(slot, {})[name] = torch.zeros(shape, device=self.parameters[name].device)

    def __repr__(self) -> str:
        elements = sum(parameter.numel() for parameter in self.parameters.values())
        return f"Optimizer({self.run.optimizer}, {elements / 1e6:.1f} M parameters)"

    @property
    def working_bytes(self) -> int:
        """Bytes of temporary tensors in an update, which takes one parameter after the other."""
        return max((working_bytes(rule, name, self.parameters[name]) for name, rule in self._rules.items()), default=0)

    @torch.no_grad()
    def precondition(self, step: int, norm: float, newest: Mapping[str, update_rules.LayerMeans]) -> None:
        """Replace the gradients of Eva's layers by its updates; `newest` holds the step's means, and `norm` bounds its KL
        divergence."""
        clipped = update_rules.clip_factor(self.run.clip, self.run.learning_rate_at(step), norm)
        for name, means in self._means_after(step, newest).items():
            for slot, mean in zip(EVA_MEANS, means, strict=True):
                self.slots[slot][name].copy_(mean)
            gradient = self.parameters[name].grad
            assert gradient is not None
            bias = self._trained_bias(name)
            bias_O = None if bias is None else self.parameters[bias].grad
            update_rules.precondition(gradient, bias_O, means, damping=self.run.epsilon, clipped=clipped)

    @torch.no_grad()
    def kl_square(
        self, step: int, gradients: Mapping[str, Tensor], newest: Mapping[str, update_rules.LayerMeans]
    ) -> float:
        """Return the sum of update * gradient over Eva's layers. Nothing changes."""
        total = 0.0
        for name, means in self._means_after(step, newest).items():
            bias = self._trained_bias(name)
            bias_O = None if bias is None else gradients[bias]
            total += update_rules.curvature(gradients[name], bias_O, means, self.run.epsilon)[1]
        return total

    def _trained_bias(self, name: str) -> str | None:
        """Return the name of the bias beside a weight; None if the layer has none, or a frozen one, which is no column of it."""
        bias = bias_of(name)
        return bias if bias in self.parameters else None

    def _means_after(
        self, step: int, newest: Mapping[str, update_rules.LayerMeans]
    ) -> dict[str, update_rules.LayerMeans]:
        """Return the running means after a step, of the layers that passes went through."""
        return {
            name: update_rules.LayerMeans(
                *(
                    update_rules.moved(self.slots[slot][name], mean, self.run.betas[1], step)
                    for slot, mean in zip(EVA_MEANS, means, strict=True)
                )
            )
            for name, means in newest.items()
            if name in self.parameters and means.output_O.any()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the parameters by their `grad`, at the end of step `step` (from 0)."""
        for (rule, treatment), names in self._groups.items():
            rate = self.run.learning_rate_at(step) * treatment.learning_rate
            if rule in FUSED:
                self._update_fused(rule, names, step, rate, treatment.weight_decay)
                continue
            for name in names:
                self._update_one(rule, name, step, rate, treatment.weight_decay)

    def _update_fused(self, rule: str, names: Sequence[str], step: int, rate: float, weight_decay: float) -> None:
        run = self.run
        parameters: list[Tensor] = [self.parameters[name] for name in names]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        slots = {slot: [self.slots[slot][name] for name in names] for slot in slots_of(rule, run)}
        if rule == "adamw":
            update_adamw(
                parameters,
                gradients,
                slots["exp_avg"],
                slots["exp_avg_sq"],
                step=step,
                learning_rate=rate,
                betas=run.betas,
                weight_decay=weight_decay,
                epsilon=run.epsilon,
            )
            return
        sgd(
            parameters,
            gradients,
            list(slots.get("momentum", [None] * len(names))),
            foreach=False,
            fused=parameters[0].device.type in FUSED_DEVICES,
            weight_decay=weight_decay,
            momentum=run.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    def _update_one(self, rule: str, name: str, step: int, rate: float, weight_decay: float) -> None:
        parameter, run = self.parameters[name], self.run
        gradient = parameter.grad
        assert gradient is not None
        slots = {slot: tensors[name] for slot, tensors in self.slots.items() if name in tensors}
        if rule == "muon":
            muon(
                name,
                parameter.data,
                gradient,
                slots["momentum"],
                beta=run.momentum,
                learning_rate=rate,
                weight_decay=weight_decay,
            )
        elif rule == "lion":
            lion(
                parameter.data,
                gradient,
                slots["exp_avg"],
                betas=run.betas,
                learning_rate=rate,
                weight_decay=weight_decay,
            )
        elif rule == "schedule-free":
            schedule_free(
                parameter.data, gradient, run=run, step=step, learning_rate=rate, weight_decay=weight_decay, **slots
            )
        else:
            adamw8bit(
                parameter.data,
                gradient,
                **slots,
                step=step,
                learning_rate=rate,
                betas=run.betas,
                weight_decay=weight_decay,
                epsilon=run.epsilon,
            )


def rule_of(run: Run, name: str, parameter: Tensor) -> str:
    """Return the optimiser that updates a parameter: AdamW those that `run.optimizer` leaves out."""
    leaves_out = (run.optimizer == "adamw8bit" and not is_quantized(parameter)) or (
        run.optimizer == "muon" and not is_matrix(name, parameter)
    )
    if run.optimizer == "eva" and not update_rules.is_watched(name, parameter):
        return "sgd"
    return "adamw" if leaves_out else run.optimizer


def bias_of(name: str) -> str:
    """Return the name of the bias beside a weight."""
    return f"{name.removesuffix('weight')}bias"


def slots_of(rule: str, run: Run) -> tuple[str, ...]:
    """Return the names of the memories that an optimiser has of a parameter, but for magnitudes of codes."""
    if rule in ("sgd", "eva"):
        return ("momentum",) if run.momentum else ()
    return SLOTS[rule]


def working_bytes(rule: str, name: str, parameter: Tensor) -> int:
    """Return the bytes of temporary tensors in an update of `parameter` by these operations; 0 for kernels that need none, and
    adamw8bit's small pieces."""
    if rule == "muon":
        return muon_bytes(name, parameter)
    return parameter.nbytes if rule in ("lion", "schedule-free") else 0


def memory_bytes(run: Run, parameters: Mapping[str, Tensor]) -> float:
    """Return the bytes of the optimiser's memory of some float32 parameters, by name, and of their average if the run keeps one."""
    total = 0.0
    for name, parameter in parameters.items():
        if not run.treat(name, parameter.dim()).frozen:
            rule = rule_of(run, name, parameter)
            element_bytes = MOMENT_BYTES if rule == "adamw8bit" else FLOAT_BYTES
            total += len(slots_of(rule, run)) * parameter.numel() * element_bytes
            total += parameter.nbytes if run.known_recipe.ema else 0
            total += (
                sum(shape.numel() for shape in update_rules.shapes_of(parameter)) * FLOAT_BYTES if rule == "eva" else 0
            )
    return total


def clip_factor(clip: float, norm: float) -> float:
    """Return the factor for gradients of this global norm. `clip` 0 turns clipping off."""
    return min(1.0, clip / (norm + CLIP_EPSILON)) if clip else 1.0
