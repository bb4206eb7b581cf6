"""Losses of adapters trained on three spans beside those of peft in one process, on the same batches. Prints JSON lines.

    python contrib/studies/adapter_losses.py [--steps 100] [--rate-share 0.2] [--families llama qwen3] [--methods lora dora]

Tiny models, float32, one process and no network: the arithmetic alone. peft must be installed (docs/testing.md).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarmnode.compute.training.adapters.adapter_recipe import METHODS
from tests.compute.training.adapters.trained import SMALL, Route, batch_of
from tests.numerics.adapter_peft import PeftTraining, saved_difference
from tests.numerics.test_adapter_training import FAMILIES, RATES, save_family

NUDGE = 1e-7


def compared(family: str, method: str, steps: int, share: float, folder: Path) -> dict[str, Any]:
    """Train one adapter both ways, at `share` of the tests' learning rate.

    `difference` is the largest one of a step's losses, relative to peft's. `itself` is that of peft from peft with a start that
    differs by a part in ten million, about the rounding of a float32 number. `logits` is the difference of the saved folder's
    logits in peft from those that the spans serve, over their standard deviation; of a soft prompt from those of peft's training.
    """
    model, checkpoint = save_family(family, folder / "model")
    recipe, rate = replace(SMALL, method=method), RATES[method] * share
    route = Route.through(checkpoint, [0, 2, 4, checkpoint.units], recipe)
    starts = {name: tensor.clone() for name, tensor in route.weights().items()}
    peft = PeftTraining(model, recipe, starts, rate, folder / "start")
    theirs = peft.train(range(steps))
    moved = {name: tensor * (1 + NUDGE) for name, tensor in starts.items()}
    again = PeftTraining(model, recipe, moved, rate, folder / "moved").train(range(steps))
    ours = route.train(range(steps), rate)
    return {
        "family": family,
        "method": method,
        "steps": steps,
        "rate": rate,
        "difference": deviation(ours, theirs),
        "itself": deviation(again, theirs),
        "logits": saved_difference(model, route, peft, batch_of(0)[0][0], folder / "end"),
        "first": theirs[0],
        "last": theirs[-1],
    }


def deviation(losses: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference of a step's losses."""
    return max(abs(one - other) / other for one, other in zip(losses, wanted, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate-share", type=float, default=1.0)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    options = parser.parse_args()
    for family in options.families:
        for method in options.methods:
            with tempfile.TemporaryDirectory() as folder:
                run = compared(family, method, options.steps, options.rate_share, Path(folder))
            print(json.dumps(run), flush=True)


if __name__ == "__main__":
    main()
