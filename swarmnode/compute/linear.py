"""Matrix products with few rows on the CPU, by whichever of two orders is faster on this machine.

One decode step multiplies each weight matrix by one to some ten rows. torch computes x W^T; for few rows BLAS libraries are often
far faster at W x^T: a single-threaded MKL on an AMD EPYC took 6.2 ms for one row and a matrix of 32000 x 512, against 3.1 ms
(8 rows: 12.4 and 7.7 ms), and the reverse for one of 4096 x 4096. So each shape is timed once, at load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

TIMED_ROWS = (1, 2, 4, 8)
REPEATS = 2
MIN_GAIN = 0.9  # of the usual time: below it the order changes
SAMPLE_BYTES = 128 << 20
MIN_ELEMENTS = 1 << 16  # smaller matrices are all overhead


class FewRowsLinear(nn.Linear):
    """A linear layer that shares another one's parameters. `weight_first[r]`: whether r rows go by W x^T."""

    def __init__(self, like: nn.Linear, weight_first: Sequence[bool]) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = like.in_features, like.out_features
        self.weight, self.bias = like.weight, like.bias
        self.weight_first = tuple(weight_first)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O)."""
        rows = x.numel() // self.in_features
        if rows >= len(self.weight_first) or not self.weight_first[rows]:
            return functional.linear(x, self.weight, self.bias)
        return weight_first_linear(x, self.weight, self.bias)


def weight_first_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """x (..., I) -> (..., O) as (W x^T)^T. One row is doubled: with one column libraries take their slower vector path."""
    x_RI = x.reshape(-1, x.shape[-1])
    rows = x_RI.shape[0]
    if rows == 1:
        x_RI = torch.cat((x_RI, x_RI))
    y_RO = torch.mm(weight_OI, x_RI.t()).t()[:rows].contiguous()
    if bias_O is not None:
        y_RO += bias_O
    return y_RO.view(*x.shape[:-1], weight_OI.shape[0])


@torch.inference_mode()
def speed_up_linears(model: nn.Module) -> None:
    """Let the large float32 linear layers on the CPU choose their order by timing, once per shape."""
    linears = {name: module for name, module in model.named_modules() if _is_candidate(module)}
    choices = _time_orders([module.weight for module in linears.values()])
    for name, module in linears.items():
        weight_first = choices.get(module.weight.shape, [])
        if any(weight_first):
            model.set_submodule(name, FewRowsLinear(module, weight_first))


def _is_candidate(module: nn.Module) -> TypeGuard[nn.Linear]:
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_ELEMENTS


def _time_orders(weights: Sequence[Tensor]) -> dict[torch.Size, list[bool]]:
    """Per shape, for 0, 1, 2... rows, whether the weight goes first; between timed numbers of rows the lower one decides.

    Whole passes over many weights are timed, as in decoding, or they would lie in the processor's cache.
    """
    sample = _first_bytes(weights, SAMPLE_BYTES)
    choices = {weight.shape: [False] * (TIMED_ROWS[-1] + 1) for weight in sample}
    for index, rows in enumerate(TIMED_ROWS):
        usual_s, other_s = (_time_pass(product, sample, rows) for product in (functional.linear, weight_first_linear))
        until = TIMED_ROWS[index + 1] if index + 1 < len(TIMED_ROWS) else rows + 1
        for shape, weight_first in choices.items():
            weight_first[rows:until] = [other_s[shape] < MIN_GAIN * usual_s[shape]] * (until - rows)
    return choices


def _first_bytes(weights: Sequence[Tensor], limit_bytes: int) -> list[Tensor]:
    """The first weights up to a limit, and one of each shape that remains."""
    sample: list[Tensor] = []
    shapes: set[torch.Size] = set()
    used_bytes = 0
    for weight in weights:
        if used_bytes < limit_bytes or weight.shape not in shapes:
            sample.append(weight)
            shapes.add(weight.shape)
            used_bytes += weight.nbytes
    return sample


def _time_pass(product: Callable[..., Tensor], weights: Sequence[Tensor], rows: int) -> dict[torch.Size, float]:
    """Per shape, the least seconds that one product took in REPEATS passes over all weights."""
    best_s: dict[torch.Size, float] = {}
    for _ in range(REPEATS):
        for weight_OI in weights:
            x_RI = torch.ones(rows, weight_OI.shape[1])
            begin_s = time.perf_counter()
            product(x_RI, weight_OI, None)
            took_s = time.perf_counter() - begin_s
            best_s[weight_OI.shape] = min(took_s, best_s.get(weight_OI.shape, took_s))
    return best_s
