"""The product that an adapter adds to one linear layer's, whatever form that layer's own weights have."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Lora:
    """`a_RI` and `b_OR` of one layer; the adapter's scale is in the second."""

    a_RI: Tensor
    b_OR: Tensor

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """What comes out for x (..., I) where the layer alone makes y (..., O) of it, in the dtype of y."""
        low = functional.linear(x.to(self.a_RI.dtype), self.a_RI)
        return y + functional.linear(low, self.b_OR).to(y.dtype)


def features_of(module: nn.Module) -> tuple[int, int] | None:
    """How many values a linear layer takes and makes; None for what is no such layer.

    Packed and quantised ones say so as torch's own do. transformers' Conv1D (GPT-2's) keeps its matrix the other way round, which
    changes nothing here: an adapter never looks at it.
    """
    for inputs, outputs in (("in_features", "out_features"), ("nx", "nf")):
        found = getattr(module, inputs, None), getattr(module, outputs, None)
        if isinstance(found[0], int) and isinstance(found[1], int):
            return found[0], found[1]
    return None
