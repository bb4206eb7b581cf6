"""Changes of one layer whose tensors take gradients; those of `compute/model/adapters/changes.py` are for serving."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarmnode.compute.executor import ByPiece, drain
from swarmnode.compute.model.adapters.changes import row_blocks
from swarmnode.compute.training.adapters.adapter_weights import PIECE_PRODUCTS


@dataclass(frozen=True)
class TrainedLora:
    """Low-rank matrices `a_RI` and `b_OR` of one layer, whose product is multiplied by `scale`.

    If `a_RI` takes no gradient (LoRA-FA), autograd keeps the projection of rank R for the way back, and not the layer's inputs.
    """

    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), with the adapter's product added, in the dtype of `y`."""
        low = functional.linear(x.to(self.a_RI.dtype), self.a_RI) * self.scale
        outputs, rank = self.b_OR.shape
        if y.dtype != self.b_OR.dtype:
            return y + functional.linear(low, self.b_OR).to(y.dtype)
        return torch.addmm(y.reshape(-1, outputs), low.reshape(-1, rank), self.b_OR.t()).view(y.shape)


class TrainedDora:
    """DoRA's matrices and `magnitude_O` of a linear layer: m * (W + s B A) / |W + s B A|, row by row; its bias stays.

    The norm counts as a constant on the way back (arXiv 2402.09353, section 4.3). It must be refreshed before the first pass, and
    after each update.
    """

    def __init__(self, lora: TrainedLora, magnitude_O: Tensor, layer: nn.Module) -> None:
        self.lora, self.magnitude_O = lora, magnitude_O
        self._layer = layer
        self._norm_O = torch.zeros_like(magnitude_O)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return `y` (..., O), the layer's own result for `x` (..., I), as the adapter changes it, in the dtype of `y`."""
        bias_O: Tensor | None = getattr(self._layer, "bias", None)
        changed = self.lora.add(x, y if bias_O is None else y - bias_O)
        changed = changed * (self.magnitude_O / self._norm_O).to(y.dtype)
        return changed if bias_O is None else changed + bias_O

    def refresh(self) -> None:
        """Compute the norms of the changed matrix's rows anew."""
        drain(self.refresh_by_piece())

    @torch.no_grad()
    def refresh_by_piece(self) -> ByPiece[None]:
        """Do `refresh`. Reads the whole matrix, some rows at a time."""
        a_RI, b_OR, squares_O = self.lora.a_RI, self.lora.b_OR * self.lora.scale, torch.zeros_like(self._norm_O)
        for outputs, inputs, block in row_blocks(self._layer, PIECE_PRODUCTS // (1 + len(a_RI))):
            squares_O[outputs] += torch.addmm(block.float(), b_OR[outputs], a_RI[:, inputs]).square().sum(dim=1)
            yield
        torch.sqrt(squares_O, out=self._norm_O)


TrainedChange = TrainedLora | TrainedDora
