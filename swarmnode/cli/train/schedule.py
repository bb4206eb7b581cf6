"""Options of a training's steps: their number and size, the optimiser and its learning rate."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from swarmnode.config import SCHEDULES_BY_NAME
from swarmnode.terminal.option import option

USUAL = {"clip": 1.0, "momentum": 0.0, "beta2": 0.95, "epsilon": 1e-8}
"""Settings that are not given"""
PUBLISHED: dict[str, dict[str, float]] = {
    "muon": {"momentum": 0.95},
    "lion": {"beta2": 0.99},
    "schedule-free": {"beta2": 0.999},
    "eva": {"clip": 1e-3, "momentum": 0.9, "beta2": 0.05, "epsilon": 0.03},
}
"""Settings that optimisers' authors recommend in place of the usual ones"""


@dataclass(frozen=True)
class ScheduleOptions:
    """Options of a training run. Each is the field of Run with the same name; `schedule` is the recipe's."""

    steps: int = option(0, "Updates in the whole run.", show_default=False)
    batch: int = option(32, "Samples per step.")
    microbatch: int = option(0, "Samples that are computed together; default: 4.", show_default=False)
    sequence: int = option(0, "Tokens per sample; default: 128.", show_default=False)
    optimizer: str = option(
        "adamw",
        "Optimiser; adamw8bit needs a quarter of AdamW's memory, for nearly the same steps. muon leaves embeddings, heads, norms "
        "and biases to AdamW; schedule-free needs --schedule constant.",
        metavar="adamw|adamw8bit|sgd|muon|lion|schedule-free|eva",
    )
    learning_rate: float = option(3e-4, "Highest learning rate.", "--lr")
    schedule: str = option(
        "cosine",
        "Learning rate after the warm-up: linear and cosine end at --final-share; hf-...: as in transformers, down to 0.",
        metavar="|".join(SCHEDULES_BY_NAME),
    )
    warmup_steps: int = option(0, "Steps during which the learning rate rises.", "--warmup")
    final_share: float = option(0.1, "Share of the learning rate at the end of linear and cosine.")
    clip: float | None = option(
        None,
        "Largest norm of the whole gradient, with eva its KL clip; 0 turns clipping off; default: 1, with eva 0.001.",
        text=-1.0,
    )
    weight_decay: float = option(0.1, "Weight decay of matrices; norms, biases and embeddings have none.")
    momentum: float | None = option(
        None, "Momentum of sgd, muon and eva; default: 0, with muon 0.95, with eva 0.9.", text=-1.0
    )
    beta1: float = option(0.9, "AdamW's share of the mean gradient that is kept.")
    beta2: float | None = option(
        None,
        "AdamW's share of the mean squared gradient that is kept, with eva of its means; default: 0.95, with schedule-free 0.999, "
        "with lion 0.99, with eva 0.05.",
        text=-1.0,
    )
    epsilon: float | None = option(
        None,
        "AdamW's smallest divisor, or eva's damping; default: 1e-8, with eva 0.03.",
        text=-1.0,
    )
    seed: int = option(0, "Seed of the order of samples and of dropout.")
    autocast: bool = option(
        True,
        "Multiply in 16 bits on GPUs that are faster at it: bfloat16 and TF32 since Ampere, float16 on Volta and Turing.",
        "--autocast/--no-autocast",
    )
    checkpoint_steps: int = option(50, "Machines save their state every this many steps.")

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Run with a recipe. Steps of 0, which follow from the epochs, are 1."""
        from swarmnode.swarm.records.run import RECIPE

        fields = dataclasses.asdict(self)
        defaults = USUAL | PUBLISHED.get(self.optimizer, {})
        fields |= {name: default for name, default in defaults.items() if fields[name] is None}
        betas = fields.pop("beta1"), fields.pop("beta2")
        return {
            **fields,
            "steps": self.steps or 1,
            "betas": betas,
            "schedule": RECIPE,
            "autocast": self.autocast and self.optimizer != "eva",
        }
