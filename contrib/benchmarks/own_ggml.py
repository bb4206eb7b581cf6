"""Fast products of the wheel's build of ggml beside those of another one, in CPU seconds of one thread. Prints JSON.

    python contrib/benchmarks/own_ggml.py FOLDER [--rounds 3]

FOLDER has ggml's libraries, as `cmake --build` wrote them. The builds take turns, each in a process of its own; figures are medians
of microseconds, and of the rounds' ratios: wheel / own above 1 means that the own build is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from swarmnode.compute.packing.ggml import FORMATS, OWN_BUILD, build
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix

OUTPUTS, INPUTS, NAMES, ROWS, LEAST_S = 5632, 2048, ("Q4_1", "Q4_K"), (1, 512), 1.0


def measure() -> dict[str, float]:
    """Return the CPU microseconds of each product by format and rows."""
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    for name in NAMES:
        form, draw = FORMATS[name], torch.Generator().manual_seed(0)
        packed_OB = torch.randint(0, 256, (OUTPUTS, form.row_bytes(INPUTS)), generator=draw).to(torch.uint8)
        for at in form.scales:
            packed_OB.view(-1, form.block_bytes)[:, at : at + 2] = torch.tensor([0.01], dtype=torch.half).view(
                torch.uint8
            )
        matrix = GgmlMatrix(packed_OB, form, INPUTS)
        for rows in ROWS:
            x_RI = torch.randn(rows, INPUTS, generator=draw)
            matrix.multiply(x_RI)
            count, began_s = 0, time.process_time()
            while (took_s := time.process_time() - began_s) < LEAST_S or count < 3:
                matrix.multiply(x_RI)
                count += 1
            found[f"{name}, {rows} rows"] = took_s / count * 1e6
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if not options.folder:  # one contestant
        print(json.dumps({"build": build(), **measure()}))
        return
    turns: list[list[dict[str, float]]] = []
    for _ in range(options.rounds):
        builds = ({}, {OWN_BUILD: options.folder})
        command = [sys.executable, __file__]
        told = [
            subprocess.run(command, env={**os.environ, **more}, check=True, capture_output=True, text=True).stdout
            for more in builds
        ]
        turns.append([json.loads(one) for one in told])
    kinds = [kind for kind in turns[0][0] if kind != "build"]
    rows = {
        kind: {
            "wheel_us": round(statistics.median(wheel[kind] for wheel, _ in turns)),
            "own_us": round(statistics.median(own[kind] for _, own in turns)),
            "wheel_of_own": round(statistics.median(wheel[kind] / own[kind] for wheel, own in turns), 2),
        }
        for kind in kinds
    }
    print(json.dumps({"builds": [one["build"] for one in turns[0]], "products": rows}, indent=1))


if __name__ == "__main__":
    main()
