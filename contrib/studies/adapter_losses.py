"""Losses of adapters trained on three spans beside those of peft in one process, on the same batches. Prints JSON lines.

    python contrib/studies/adapter_losses.py [--steps 100] [--families llama qwen3] [--methods lora dora]

Tiny models, float32, one process and no network: the arithmetic alone. peft must be installed (docs/testing.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.compute.training.adapters.recipe import METHODS
from tests.compute.training.adapters.trained import SMALL, Route
from tests.numerics.adapter_peft import PeftTraining
from tests.numerics.test_adapter_training import FAMILIES, RATES, save_family


def compared(family: str, method: str, steps: int, folder: Path) -> dict[str, Any]:
    """Train one adapter both ways; `difference` is the largest one of a step's losses, relative to peft's."""
    model, checkpoint = save_family(family, folder / "model")
    recipe = replace(SMALL, method=method)
    route = Route.through(checkpoint, [0, 2, 4, checkpoint.units], recipe)
    starts = {name: tensor.clone() for name, tensor in route.weights().items()}
    theirs = PeftTraining(model, recipe, starts, RATES[method], folder / "start").train(range(steps))
    ours = route.train(range(steps), RATES[method])
    difference = max(abs(one - other) / other for one, other in zip(ours, theirs, strict=True))
    about = {"family": family, "method": method, "steps": steps}
    return {**about, "difference": difference, "first": theirs[0], "last": theirs[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    for family in options.families:
        for method in options.methods:
            with tempfile.TemporaryDirectory() as folder:
                run = compared(family, method, options.steps, Path(folder))
            print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
