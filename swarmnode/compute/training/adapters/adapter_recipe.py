"""Recipe of an adapter's training: plain values that fix its weights' start, its passes and its updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from swarmnode.compute.model.adapters.adapter_file import MAX_ALPHA, MAX_PATTERN_CHARS, MAX_PATTERNS, MAX_RANK
from swarmnode.errors import UsageError

METHODS = ("lora", "lora-fa", "dora", "prompt")
NO_METHOD = "none"
PLACELESS = ("prompt", NO_METHOD)
"""Methods that change no layer"""
ALL_LINEAR = "all-linear"
MAX_PROMPT_TOKENS = 4096
MOST_FLOAT = 3.4e38  # updates compute in float32
MAX_FROZEN_RANK = (
    512  # of lora-fa, which inverts a matrix of this size for each layer, in one piece of the device's work
)


@dataclass(frozen=True)
class AdapterRecipe:
    """Recipe of an adapter's training. Raises UsageError if a value is out of its bounds.

    Args:
        method: "lora" (arXiv 2106.09685), "lora-fa" (2308.03303), "dora" (2402.09353), "prompt" (2104.08691), or "none": no
            weights, only gradients of the values that enter the layers.
        rank: Rank of the two matrices of each layer.
        alpha: Numerator of the scale of their product.
        targets: Names of linear layers, or their ends; "all-linear" for all but the head.
        rslora: Divide `alpha` by the root of the rank, not by the rank (2312.03732).
        prompt_tokens: Length of the soft prompt; used by "prompt" only.
        seed: Seed of the weights' start, which is a pure function of (seed, layer's name).
        betas: Decay rates of AdamW's two moments.
        epsilon: Term that AdamW adds to the divisor.
        weight_decay: Decoupled weight decay, times the learning rate.
        clip: Largest global norm of the gradient; 0 turns clipping off.
    """

    method: str = "lora"
    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | str = ALL_LINEAR
    rslora: bool = False
    prompt_tokens: int = 16
    seed: int = 0
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, NO_METHOD):
            raise UsageError(f"no method {self.method[:64]!r}: use one of {', '.join(METHODS)}")
        if not 1 <= self.rank <= MAX_RANK:
            raise UsageError(f"a rank of {self.rank}: it must be from 1 to {MAX_RANK}")
        if self.method == "lora-fa" and self.rank > MAX_FROZEN_RANK:
            raise UsageError(f"a rank of {self.rank}: lora-fa takes at most {MAX_FROZEN_RANK}; use lora for more")
        if not 1 <= self.prompt_tokens <= MAX_PROMPT_TOKENS:
            raise UsageError(f"a prompt of {self.prompt_tokens} tokens: it must have 1 to {MAX_PROMPT_TOKENS}")
        if not 0 < self.alpha <= MAX_ALPHA:
            raise UsageError(f"an alpha of {self.alpha:g}: it must be above 0 and at most {MAX_ALPHA:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas of {self.betas}: they must be from 0 to below 1")
        for name, value in (("epsilon", self.epsilon), ("weight decay", self.weight_decay), ("clip", self.clip)):
            if not 0 <= value <= MOST_FLOAT:
                raise UsageError(f"a {name} of {value:g}: it must be from 0 to {MOST_FLOAT:g}")
        if isinstance(self.targets, str):
            if self.targets != ALL_LINEAR:
                raise UsageError(f"targets {self.targets[:64]!r}: give names of layers, or {ALL_LINEAR!r}")
        elif not 1 <= len(self.targets) <= MAX_PATTERNS:
            raise UsageError(f"{len(self.targets)} targets: give 1 to {MAX_PATTERNS} names of layers")
        elif not all(0 < len(name) <= MAX_PATTERN_CHARS for name in self.targets):
            raise UsageError(f"a target's name must have 1 to {MAX_PATTERN_CHARS} characters")

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def prompt_positions(self) -> int:
        """Positions that a soft prompt takes before a row's tokens; 0 for other methods."""
        return self.prompt_tokens if self.method == "prompt" else 0

    def epsilon_at(self, step: int) -> float:
        """Return the term that the update after `step` others adds to AdamW's divisor.

        LoRA-FA adds it before the divisor's correction of bias, as peft's `create_lorafa_optimizer` does.
        """
        return self.epsilon / math.sqrt(1 - self.betas[1] ** (step + 1)) if self.method == "lora-fa" else self.epsilon
