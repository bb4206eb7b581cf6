"""Linear layers with weights in 8 bits: a scale for each row of the matrix, and inputs as they are.

LLM.int8 (arXiv 2208.07339), which quantises inputs too, keeps columns of them apart where any row of a batch has an outlier, so
that who shares a pass with whom would change what everybody gets.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

LEVELS = 127


class Int8Linear(nn.Module):
    """`weight_OI` (int8) times `scale_O1` (float32) is the matrix; made on its device, layer by layer, while it multiplies."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        full_OI = linear.weight.detach().to(device, torch.float32)
        scale_O1 = (full_OI.abs().amax(dim=1, keepdim=True) / LEVELS).clamp_(min=torch.finfo(torch.float32).tiny)
        self.register_buffer("weight", (full_OI / scale_O1).round_().to(torch.int8))
        self.register_buffer("scale_O1", scale_O1)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().to(device), requires_grad=False)

    def extra_repr(self) -> str:
        """As nn.Linear's."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., I) -> (..., O) in the dtype of x."""
        weight: Tensor = self.get_buffer("weight")
        scale_O1: Tensor = self.get_buffer("scale_O1")
        return functional.linear(x, weight * scale_O1.to(x.dtype), self.bias)
