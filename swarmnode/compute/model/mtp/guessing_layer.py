"""Layer beside a model's head that guesses tokens from the states which leave the model's last layer."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.span import ModelSpan


class GuessingLayer(ABC):
    """Decoder layer with an embedding and a projection before it, and the model's head behind it, on the device of that head.

    Only `move_to` and `close` may be used from another thread than the device's.

    Args:
        main: Span with the model's head and final norm, which the layer uses, too.
        block: The decoder layer, as a span of a model with one layer.
        ends: The layer's other modules.
    """

    def __init__(self, main: ModelSpan, block: ModelSpan, ends: nn.ModuleDict) -> None:
        self.block = block
        self._main = main
        self._ends = ends

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.weight_bytes / 1e6:.1f} MB beside {self._main!r}>"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer's own weights."""
        return self.block.weight_bytes + sum(int(parameter.nbytes) for parameter in self._ends.parameters())

    def move_to(self, device: torch.device) -> None:
        """Move the weights to another device."""
        self.block.move_to(device)
        self._ends.to(device)

    def close(self) -> None:
        """Free the memory of the weights. The layer cannot run afterwards."""
        self.block.close()
        for module in self._ends.values():
            module._parameters.clear()

    @abstractmethod
    def take(self, left_RTH: Tensor) -> Tensor:
        """Return states (R, T, H) that left the model's last layer in the form of the layer's own states."""

    @abstractmethod
    def enter(self, hidden_RTH: Tensor, ids_RT: Tensor) -> Tensor:
        """Return the inputs (R, T, H) of the decoder layer.

        Args:
            hidden_RTH: States that left the decoder layer, or states from `take`.
            ids_RT: Token behind each position (int64).
        """

    @abstractmethod
    def guess(self, hidden_RH: Tensor) -> Tensor:
        """Return the most likely ids_R (int64) after positions whose hidden_RH left the decoder layer."""


def embedding_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of the token embedding in a checkpoint; None if it has none."""
    end = f".{checkpoint.family.input_embedding}.weight"
    return next((name for name in checkpoint.entries if f".{name}".endswith(end)), None)


def linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> nn.Linear:
    """Return a frozen linear module with these weights."""
    module = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    module.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        module.bias = nn.Parameter(bias_O, requires_grad=False)
    return module
