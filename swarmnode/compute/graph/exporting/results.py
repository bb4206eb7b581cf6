"""Results of a module for its example batch, as the results of a graph: its mean loss, or its outputs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from swarmnode.errors import UsageError

OUTPUT = "output"  # name of the output of a module that returns one tensor


class Loss(nn.Module):
    """Wrapper of a module whose forward returns only the loss, found in the module's output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> Tensor:
        output = self.module(*args, **kwargs)
        loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
        if loss is None and isinstance(output, tuple | list) and output:
            loss = output[0]
        if loss is None and isinstance(output, Mapping):
            loss = output.get("loss")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(output).__name__
            raise UsageError(
                f"{type(self.module).__name__} returned {what} for the example batch: its forward must give the mean loss "
                "(a scalar, an output with .loss, or a tuple that begins with it); the labels belong to the batch"
            )
        return loss


class Outputs(nn.Module):
    """Wrapper of a module that returns its tensors by name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> dict[str, Tensor]:
        output = self.module(*args, **kwargs)
        named = dict(_named(output, "", type(self.module).__name__))
        if not named:
            raise UsageError(
                f"{type(self.module).__name__} returned no tensor for the example batch; return at least one"
            )
        return named


def _named(value: Any, name: str, module: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a module's result, named by the keys and numbers that lead to them, as "hidden_states_2"; a lone
    tensor is named `OUTPUT`. None is left out.

    Raises UsageError for other results than tensors.
    """
    if isinstance(value, Tensor):
        yield name or OUTPUT, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}_{key}" if name else str(key), module)
    elif isinstance(value, tuple | list):
        keys = getattr(value, "_fields", range(len(value)))
        for key, item in zip(keys, value, strict=True):
            yield from _named(item, f"{name or (OUTPUT if isinstance(key, int) else '')}_{key}".strip("_"), module)
    elif value is not None:
        raise UsageError(f"{module} returned {type(value).__name__} {name}: only tensors can be the outputs of a graph")
