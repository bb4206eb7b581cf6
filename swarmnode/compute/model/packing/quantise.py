"""Rounding of matrices to GGUF's formats, row by row: by ggml if it is there, else by the package gguf, which has fewer formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from swarmnode.compute.model.packing.ggml import DTYPES, PACKAGE, Format, check_finite, library
from swarmnode.errors import CheckpointError, LocalError
from swarmnode.version import missing_package

TILE_ELEMENTS = 1 << 20  # rounded in one call: 4 MiB as float32
LARGE = 6e4  # scales of larger values may overflow float16
PYTHON_FORMATS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *DTYPES})
"""Formats that the package gguf rounds to"""


def check_format(form: Format) -> None:
    """Raise LocalError if this machine cannot round to a format."""
    ggml = library()
    if form.name not in PYTHON_FORMATS and (ggml is None or ggml.quantise_rows is None):
        raise LocalError(
            f"rounding to {form.name} needs ggml, and {missing_package(PACKAGE)}; or choose q4_0 to q5_1 or q8_0"
        )


def quantise(values_OI: Tensor, form: Format, name: str) -> Tensor:
    """Return rows (O, bytes of a row) as uint8 in a format, rounded from float32 (O, I).

    Raises ValueError if a row has no whole blocks, CheckpointError if the tensor `name` has values that are no finite numbers, or
    too large ones, LocalError as `check_format` does.
    """
    rows, inputs = values_OI.shape
    row_bytes = form.row_bytes(inputs)
    largest = float(values_OI.abs().max()) if values_OI.numel() else 0.0
    if not largest < torch.inf:  # also NaN
        raise CheckpointError(f"{name} holds values that are no finite numbers; fetch the checkpoint again")
    packed_OB = _rounded(values_OI.contiguous(), form).view(rows, row_bytes)
    if largest > LARGE:
        check_finite(packed_OB.view(-1), form, f"{name} is too large for {form.name}: rounded it")
    return packed_OB


def _rounded(values_OI: Tensor, form: Format) -> Tensor:
    """Return the bytes of rows in a format, as uint8."""
    if form.name in DTYPES:
        return values_OI.to(DTYPES[form.name]).view(torch.uint8)
    rows, inputs = values_OI.shape
    ggml = library()
    if ggml is not None and ggml.quantise_rows is not None:
        packed_OB = torch.empty(rows, form.row_bytes(inputs), dtype=torch.uint8)
        ggml.quantise_rows(form.number, values_OI.data_ptr(), packed_OB.data_ptr(), 0, rows, inputs, None)
        return packed_OB
    check_format(form)
    import gguf

    return torch.from_numpy(gguf.quantize(values_OI.numpy(), gguf.GGMLQuantizationType[form.name]))


def quantised_tiles(
    rows: int, inputs: int, read: Callable[[int, int], Tensor], form: Format, name: str
) -> Iterator[Tensor]:
    """Yield the rows of the tensor `name` in a format, some at a time, in order: at most TILE_ELEMENTS for each of torch's threads.

    `read(first, end)` returns rows as float32. Raises as `quantise` and `read` do.
    """
    height = max(1, TILE_ELEMENTS // inputs)
    threads = torch.get_num_threads()
    begins = range(0, rows, height)

    def tile(first: int) -> Tensor:
        return quantise(read(first, min(first + height, rows)), form, name)

    with ThreadPoolExecutor(threads, thread_name_prefix="quantise") as workers:
        for first in range(0, len(begins), threads):  # not all at once: memory stays bounded
            yield from workers.map(tile, begins[first : first + threads])
