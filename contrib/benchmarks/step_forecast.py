"""Forecast seconds of steps of small training swarms, against the measured ones. Prints JSON.

    python contrib/benchmarks/step_forecast.py [--steps 6] [--batch 32] [--microbatch 4] [--hidden 512] [--layers 8]

The swarms and settings of `training.py`: nodes are processes of their own with one thread, on loopback. Nothing is measured before
the first step but the machine's rates; later ones are corrected by how far off the last ones were.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training import bench_of, parse_options, shapes_of


def steps_of(log: Path) -> dict[str, Any]:
    """Return the expected and the measured seconds of each step, and the relative errors; an error is None if nothing was
    expected."""
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return {
        "expected_s": [round(step["expected_s"], 3) for step in steps],
        "step_s": [round(step["step_s"], 3) for step in steps],
        "off": [round(step["step_s"] / step["expected_s"] - 1, 3) if step["expected_s"] else None for step in steps],
    }


def main() -> None:
    options = parse_options(__doc__)
    with bench_of(options) as bench:
        report = {shape: steps_of(bench.swarm(spans)) for shape, spans in shapes_of(options.layers + 2).items()}
    print(json.dumps({"settings": vars(options), **report}, indent=2))


if __name__ == "__main__":
    main()
