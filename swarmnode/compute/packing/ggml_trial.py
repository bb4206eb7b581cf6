"""Trial of a build of ggml: its products of every format beside those of the values that the package gguf dequantises."""

from __future__ import annotations

import numpy as np
import torch

from swarmnode.compute.packing.ggml import DTYPES, FORMATS
from swarmnode.compute.packing.ggml_matrix import TRIED_OUTPUTS, TRIED_ROWS, GgmlMatrix
from swarmnode.errors import LocalError

INPUTS, MOST_LOST = 512, {"exact": 1e-4, "fast": 0.03}
"""Width of the tried matrices, and the largest share of a product that rounding may take"""


def try_products() -> None:
    """Compare the chosen build's products with those of the values that the package gguf dequantises.

    For a process of its own: it prints the first difference, or why the build cannot be loaded, and ends with 1.
    """
    try:
        wrong = next(filter(None, map(_difference, FORMATS)), "")
    except LocalError as error:
        wrong = str(error)
    if wrong:
        print(wrong)
        raise SystemExit(1)


def _difference(name: str) -> str:
    """Return how products of a matrix in the format `name` differ from what they must be; empty if they do not."""
    import gguf

    form, draw = FORMATS[name], torch.Generator().manual_seed(0)
    rows_OB = torch.randint(0, 256, (TRIED_OUTPUTS, form.row_bytes(INPUTS)), generator=draw).to(torch.uint8)
    blocks_NB = rows_OB.view(-1, form.block_bytes)
    for at in form.scales:
        blocks_NB[:, at : at + 2] = torch.tensor([0.01], dtype=torch.float16).view(torch.uint8)
    if name in DTYPES:
        rows_OB = torch.randn(TRIED_OUTPUTS, INPUTS, generator=draw).to(DTYPES[name]).view(torch.uint8)
    elif not form.scales:  # MXFP4: a scale is a power of two
        blocks_NB[:, 0] = 120
    values = gguf.dequantize(rows_OB.numpy(), gguf.GGMLQuantizationType[name])
    weight_OI = torch.from_numpy(np.copy(values)).view(TRIED_OUTPUTS, INPUTS)
    x_RI = torch.randn(max(TRIED_ROWS), INPUTS, generator=draw)
    expected_RO = x_RI @ weight_OI.t()
    for kind, most in MOST_LOST.items():
        matrix = GgmlMatrix(rows_OB, form, INPUTS, exact=kind == "exact")
        for count in (1, *TRIED_ROWS):
            wanted_RO = expected_RO[:count]
            lost = float((matrix.multiply(x_RI[:count]) - wanted_RO).norm() / wanted_RO.norm())
            if not lost < most:
                return f"its {kind} products of {name} with {count} rows are wrong by {lost:.1g} of their size"
    return ""
