"""Whether tensors are the values of a boundary of a graph, by what is said of them: for who computes, and for who asks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import DTYPE_OF, TORCH_DTYPE
from swarmnode.compute.graph.arguments import torch_constant
from swarmnode.compute.graph.graph import TensorType
from swarmnode.compute.graph.layout import Layout, Value
from swarmnode.errors import CheckpointError, ProtocolError

Described = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape of a tensor"""


def described(values: Sequence[Tensor]) -> list[Described]:
    """What is to be said of tensors that are here."""
    return [(value.dtype, tuple(value.shape)) for value in values]


def told(infos: Sequence[TensorInfo]) -> list[Described]:
    """What a peer says of tensors that it sends as they are. Raises ProtocolError where it compresses them: what they become might
    take any memory."""
    if any(info.codec != Codec.NONE for info in infos):
        raise ProtocolError("the values of a pass travel as they are")
    return [(TORCH_DTYPE[info.dtype], info.shape) for info in infos]


def batch_of(layout: Layout, number: int, values: Sequence[Described]) -> int:
    """The size of the batch whose values these are before unit `number`. Raises ProtocolError where they are not those of that
    boundary."""
    batch = layout.graph.batch
    if layout.graph.any_batch:
        for value, (_, shape) in zip(layout.boundaries[number], values, strict=False):
            if value.type.tells_batch and len(shape) == len(value.type.shape):
                batch = value.type.batch_of(shape)
                break
    check_values(layout, number, values, batch)
    return batch


def check_values(layout: Layout, number: int, values: Sequence[Described], batch: int) -> None:
    """Raises ProtocolError where they are not those of a boundary for a batch of so many samples."""
    if batch < 1:
        raise ProtocolError("a batch without samples")
    _check(layout.boundaries[number], values, batch, f"at boundary {number}", any_batch=layout.graph.any_batch)


def check_labels(layout: Layout, labels: Sequence[Described], batch: int) -> None:
    """Raises ProtocolError where they are not what the last unit takes of the inputs of so many samples."""
    _check(layout.labels, labels, batch, "among the labels", any_batch=layout.graph.any_batch)


def _check(wanted: Sequence[Value], values: Sequence[Described], batch: int, where: str, *, any_batch: bool) -> None:
    if len(values) != len(wanted):
        raise ProtocolError(f"{len(values)} values {where} of the graph, not {len(wanted)}")
    for value, (dtype, shape) in zip(wanted, values, strict=True):
        text = text_of((dtype, shape))
        if len(shape) != len(value.type.shape) or not _fits(dtype, value.type.dtype):
            raise ProtocolError(f"{value.ref.name} is {text} {where}, not {value.type}")
        sizes = value.type.sizes(batch)
        if shape != sizes:
            hint = "" if any_batch else f" (the module was exported for batches of {batch} only)"
            raise ProtocolError(f"{value.ref.name} is {text} {where}, not {sizes}{hint}")


def check_travel(layout: Layout) -> None:
    """Raises CheckpointError where something crosses between units as a dtype that frames do not carry."""
    for number, boundary in enumerate(layout.boundaries):
        for value in boundary:
            if wire_dtype(value.type) not in DTYPE_OF:
                raise CheckpointError(
                    f"{value.ref.name} at boundary {number} is {value.type.dtype}, which does not travel"
                )


def wire_dtype(kind: TensorType) -> torch.dtype:
    """As what a value travels: what is true or false as bytes, all else as itself."""
    dtype: torch.dtype = torch_constant(kind.dtype)
    return torch.uint8 if dtype is torch.bool else dtype


def to_wire(values: Sequence[Tensor]) -> list[Tensor]:
    """The values as they travel."""
    return [value.to(torch.uint8) if value.dtype is torch.bool else value for value in values]


def from_wire(layout: Layout, number: int, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The values of a boundary in the graph's own dtypes, as they were before they travelled."""
    wanted = (torch_constant(value.type.dtype) for value in layout.boundaries[number])
    return tuple(value.to(dtype) for value, dtype in zip(values, wanted, strict=True))


def text_of(described: Described) -> str:
    """As in "float32 (2, 3)"."""
    dtype, shape = described
    return f"{str(dtype).removeprefix('torch.')} {shape}"


def _fits(dtype: torch.dtype, wanted: str) -> bool:
    """Under autocast a float may come in another precision, and what is true or false travels as bytes."""
    own = torch_constant(wanted)
    if not isinstance(own, torch.dtype):
        return False
    both_floats = dtype.is_floating_point and own.is_floating_point
    return dtype == own or both_floats or (own is torch.bool and dtype is torch.uint8)
