"""Study of row invariance: which products give a row the same bits alone and among 1 to 8 rows, and at which cost.

    OMP_NUM_THREADS=1 python contrib/studies/row_invariance.py --dtype bfloat16

Drafted steps have one to eight rows. A text in 16 bits is the same with and without guesses only if each row of each product, and
each query of attention, has the bits that it has alone. Every way of multiplying is tried on matrices of SmolLM2's and of a 1.1 B
llama's shapes. Prints JSON. For each way there are its CPU time for 1 and 8 rows, and whether rows keep their bits. For each shape
there is the fastest way that keeps them, with its time for 1 to 8 rows in multiples of the fastest way's. Attention is tried in the
same manner.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from swarmnode.compute.model.linear import FORMS, OTHERS, USUAL

ROWS = (1, 2, 3, 4, 5, 6, 7, 8)
SHAPES = {"SmolLM2 q": (576, 576), "SmolLM2 up": (1536, 576), "1.1 B q": (2048, 2048), "1.1 B up": (5632, 2048)}
ROUNDS = 9


def ways(weight_OI: Tensor) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return the ways of multiplying with a matrix that work here, by name."""
    dtype = weight_OI.dtype
    found = {product.__name__: product for product in (USUAL, *OTHERS[dtype])}
    forms = {form.__name__: form(weight_OI, None) for form in FORMS[dtype] if form.works(dtype)}
    plain = {name: lambda x, product=product: product(x, weight_OI, None) for name, product in found.items()}
    return {**plain, **forms}


def keeps_bits(compute: Callable[[Tensor], Tensor], x_RI: Tensor) -> bool:
    """Return whether the first rows have the same bits for each number of rows."""
    alone = torch.cat([compute(x_RI[row : row + 1]) for row in range(len(x_RI))])
    return all(torch.equal(compute(x_RI[:rows].contiguous()), alone[:rows]) for rows in ROWS)


def times_s(computes: dict[str, Callable[[Tensor], Tensor]], x_RI: Tensor) -> dict[str, dict[int, float]]:
    """Return the median CPU seconds by way and number of rows; the ways take turns."""
    taken: dict[str, dict[int, list[float]]] = {name: {rows: [] for rows in ROWS} for name in computes}
    for _ in range(ROUNDS):
        for rows in ROWS:
            part = x_RI[:rows].contiguous()
            for name, compute in computes.items():
                began_s = time.thread_time()
                compute(part)
                taken[name][rows].append(time.thread_time() - began_s)
    return {name: {rows: median(each) for rows, each in by_rows.items()} for name, by_rows in taken.items()}


def study(shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Return the findings about one shape of matrix."""
    generator = torch.Generator().manual_seed(1)
    weight_OI = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype)
    x_RI = torch.randn(max(ROWS), shape[1], generator=generator).to(dtype)
    computes = ways(weight_OI)
    keeping = {name for name, compute in computes.items() if keeps_bits(compute, x_RI)}
    taken = times_s(computes, x_RI)
    best = {rows: min(each[rows] for each in taken.values()) for rows in ROWS}
    costs = {name: {rows: taken[name][rows] / best[rows] for rows in ROWS} for name in computes}
    told = {
        name: {"keeps bits": name in keeping, **{f"{rows} rows, us": round(1e6 * taken[name][rows]) for rows in (1, 8)}}
        for name in computes
    }
    least = min(keeping, key=lambda name: sum(costs[name].values()), default=None)
    multiples = {} if least is None else {str(rows): round(cost, 2) for rows, cost in costs[least].items()}
    return {"ways": told, "fastest that keeps bits": least, "in multiples of the fastest": multiples}


def attention_keeps_bits(dtype: torch.dtype) -> dict[str, bool]:
    """Return whether the last query has the same bits alone and behind others, by the number of columns."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for columns in (40, 200, 1000):
        q, k, v = (torch.randn(1, 9, columns, 64, generator=generator).to(dtype) for _ in range(3))
        alone = functional.scaled_dot_product_attention(q[:, :, -1:], k, v)
        same = True
        for count in ROWS[1:]:
            mask = torch.ones(count, columns, dtype=torch.bool).tril(columns - count)
            together = functional.scaled_dot_product_attention(q[:, :, -count:], k, v, attn_mask=mask)
            same = same and torch.equal(together[:, :, -1:], alone)
        found[str(columns)] = same
    return found


def on_card(device: str, dtype: torch.dtype) -> dict[str, dict[str, bool]]:
    """Return by shape of matrix, and by numbers of rows, whether the first row has the bits that it has among 16."""
    found: dict[str, dict[str, bool]] = {}
    for name, shape in SHAPES.items():
        weight_OI = torch.randn(shape, device=device).to(dtype)
        x_RI = torch.randn(2048, shape[1], device=device).to(dtype)
        expected = USUAL(x_RI[:16], weight_OI, None)[:1]
        counts = (1, 2, 8, 16, 17, 32, 33, 64, 128, 512, 2048)
        found[name] = {str(rows): torch.equal(USUAL(x_RI[:rows], weight_OI, None)[:1], expected) for rows in counts}
    return found


@torch.inference_mode()
def main() -> None:
    """Print the findings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--device", default="cpu", help="cuda: whether torch's own product keeps bits, by shape and rows"
    )
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if options.device != "cpu":
        print(json.dumps(on_card(options.device, dtype), indent=2))
        return
    torch.set_num_threads(1)
    shapes = {name: study(shape, dtype) for name, shape in SHAPES.items()}
    print(json.dumps({"shapes": shapes, "attention keeps bits, by columns": attention_keeps_bits(dtype)}, indent=2))


if __name__ == "__main__":
    main()
