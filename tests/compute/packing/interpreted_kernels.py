"""Triton kernels of packed matrices, computed by Triton's interpreter on a CPU.

`python -m tests.compute.packing.interpreted_kernels [FORMAT…]` prints the findings for each format, as JSON.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import Tensor

from swarmnode.compute.packing.block_values import values_of
from swarmnode.compute.packing.ggml import DTYPES, FORMATS, Format

VARIABLE = "TRITON_INTERPRET"  # is read when a kernel is defined
OUTPUTS, INPUTS, ROWS = 18, 256, 17  # two tiles of outputs, and two of rows
LARGEST = 1e3  # scales of random bytes may be huge, or NaN


def random_rows(form: Format, outputs: int, inputs: int, seed: int = 3) -> Tensor:
    """Return rows_OB of random bytes whose values are finite and not large."""
    random = torch.Generator().manual_seed(seed)
    found: list[Tensor] = []
    while len(found) < outputs * inputs // form.block:
        blocks_NB = torch.randint(0, 256, (1024, form.block_bytes), dtype=torch.uint8, generator=random)
        values_NE = values_of(blocks_NB.view(-1), form).view(len(blocks_NB), form.block)
        found += blocks_NB[values_NE.abs().amax(dim=1) < LARGEST]
    return torch.stack(found[: outputs * inputs // form.block]).view(outputs, -1)


def check(form: Format) -> dict[str, object]:
    """Return whether values are torch's, how far products are off, and whether a row alone has the same."""
    from swarmnode.compute.packing import triton_kernels

    packed_OB = random_rows(form, OUTPUTS, INPUTS)
    packed_B = packed_OB.view(-1)
    values_OI = values_of(packed_B, form).view(OUTPUTS, INPUTS)
    numbers_N = torch.tensor([3, 0, OUTPUTS - 1])
    rows_NI = triton_kernels.values(packed_B, form, INPUTS, numbers_N, torch.float16)
    first_NI = triton_kernels.values(packed_B, form, INPUTS, 2, torch.float32)
    x_RI = torch.randn(ROWS, INPUTS, generator=torch.Generator().manual_seed(4))
    tile = triton_kernels.TILES[1]
    y_RO = triton_kernels.multiply(packed_B, form, x_RI, OUTPUTS, tile)
    wanted_RO = x_RI.double() @ values_OI.double().t()
    alone_RO = triton_kernels.multiply(packed_B, form, x_RI[-1:].contiguous(), OUTPUTS, tile)
    return {
        "values": torch.equal(first_NI, values_OI[:2]) and torch.equal(rows_NI, values_OI[numbers_N].half()),
        "error": float((y_RO - wanted_RO).abs().max() / wanted_RO.abs().max()),
        "alone": torch.equal(alone_RO, y_RO[-1:]),
    }


def main() -> None:
    """Check the formats that are named, or all that have kernels."""
    os.environ[VARIABLE] = "1"
    names = sys.argv[1:] or [name for name in FORMATS if name not in DTYPES]
    print(json.dumps({name: check(FORMATS[name]) for name in names}))


if __name__ == "__main__":
    main()
