"""Arguments of a graph as torch's: what a name, a size or a device in the file stands for."""

from __future__ import annotations

from typing import Any

import torch

from swarmnode.compute.graph.graph import Argument, Constant, Here, Real
from swarmnode.errors import CheckpointError

_CONSTANTS: dict[str, Any] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"),
        *("complex128", "strided", "contiguous_format", "preserve_format", "channels_last", "channels_last_3d"),
    )
}


def torch_constant(name: str) -> Any:
    """The dtype, memory format or layout of that name. Raises CheckpointError for anything else."""
    if name not in _CONSTANTS:
        raise CheckpointError(f"the graph names {name!r:.80}, which is no dtype or format that a graph may use")
    return _CONSTANTS[name]


def argument_value(argument: Argument, device: torch.device) -> Any:
    """What an operator is called with for an argument that is no value and no size."""
    if isinstance(argument, Constant):
        return torch_constant(argument.name)
    if isinstance(argument, Real):
        return float(argument.text)
    return device if isinstance(argument, Here) else argument
