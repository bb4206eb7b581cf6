"""Weights, gradients and moments of one adapter on one span, each strung together in one vector, and their updates by AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.compute.training.adapters.recipe import AdapterRecipe
from swarmnode.compute.training.optimizer import update_adamw
from swarmnode.compute.training.saved_activations import is_finite
from swarmnode.errors import CheckpointError, NotFinite

VECTORS = ("weight", "exp_avg", "exp_avg_sq")
"""Vectors of an adapter's state. The state's tensors are their parts, named "weight/NAME" and so on."""
STEP = "step"
"""Name of the number of updates (int64) in a state"""
MOST_STEPS = 1 << 53
MOMENTS = 2
"""Numbers that an adapter's updates keep for each weight"""


class AdapterWeights:
    """Trained tensors of an adapter, by name: float32 views of one vector each of weights, gradients and AdamW's moments.

    `step` is the number of updates. `tensors` are the
    weights, and take gradients; they are written only by updates and loads. `unit` is the span's first, for errors.
    """

    def __init__(self, starts: Mapping[str, Tensor], device: torch.device, *, unit: int) -> None:
        self.step = 0
        self._unit = unit
        self._shapes = {name: tensor.shape for name, tensor in sorted(starts.items())}
        self._weight_N = torch.empty(sum(shape.numel() for shape in self._shapes.values()), device=device)
        self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N = (torch.zeros_like(self._weight_N) for _ in range(3))
        self.tensors = self._views(self._weight_N)
        self.gradients = self._views(self._gradient_N)
        for name, tensor in self.tensors.items():
            tensor.copy_(starts[name]).requires_grad_()

    def __repr__(self) -> str:
        return (
            f"AdapterWeights({len(self._shapes)} tensors, {len(self._weight_N) / 1e6:.2f} M weights, step {self.step})"
        )

    def _views(self, vector_N: Tensor) -> dict[str, Tensor]:
        parts = torch.split(vector_N, [shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}

    @property
    def _vectors(self) -> tuple[Tensor, ...]:
        return self._weight_N, self._exp_avg_N, self._exp_avg_sq_N

    @torch.no_grad()
    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        """Add one microbatch's gradients to the step's sums. Raises NotFinite, adding nothing, if one is NaN or infinite."""
        if not is_finite(list(gradients.values())):
            raise self._not_finite("holds NaN or infinity")
        for name, gradient in gradients.items():
            self.gradients[name].add_(gradient)

    def _not_finite(self, what: str) -> NotFinite:
        text = f"the adapter's gradient {what}; lower --lr or --clip, or check the data"
        return NotFinite(text, unit=self._unit)

    def discard(self) -> None:
        """Set the step's sums of gradients to zero."""
        self._gradient_N.zero_()

    def gradient_square(self) -> float:
        """Return the square of the norm of the step's gradient. Raises NotFinite if it is NaN or infinite."""
        norm = torch.linalg.vector_norm(self._gradient_N).item()
        if not math.isfinite(norm):
            raise self._not_finite("is too large for float32")
        return float(norm * norm)

    @torch.no_grad()
    def update(self, recipe: AdapterRecipe, learning_rate: float, factors: Mapping[str, Tensor], scale: float) -> None:
        """Update the weights by the step's gradient times `scale`, and set the sums to zero.

        `factors` are matrices (R, R) that the gradients of some matrices (O, R) are multiplied with first.
        """
        self._gradient_N.mul_(scale)
        for name, factor_RR in factors.items():
            self.gradients[name].copy_(self.gradients[name] @ factor_RR)
        if len(self._weight_N):
            update_adamw(
                *([vector_N] for vector_N in (self._weight_N, self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N)),
                step=self.step,
                learning_rate=learning_rate,
                betas=recipe.betas,
                weight_decay=recipe.weight_decay,
                epsilon=recipe.epsilon_at(self.step),
            )
        self.step += 1
        self.discard()

    def state(self) -> dict[str, Tensor]:
        """Return weights, moments and the number of updates, by name: references, not copies."""
        named = zip(VECTORS, self._vectors, strict=True)
        tensors = {f"{kind}/{name}": view for kind, vector_N in named for name, view in self._views(vector_N).items()}
        return {**tensors, STEP: torch.tensor(self.step)}

    @torch.no_grad()
    def load_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace the step's sums of gradients by `gradients`, which have the names of the weights.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        self._check(self.gradients, gradients)
        for name, tensor in self.gradients.items():
            tensor.copy_(gradients[name])

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load a state, bit for bit, and forget gradients. Other tensors in `state` are ignored.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        own = self.state()
        self._check(own, state)
        if not 0 <= int(state[STEP]) <= MOST_STEPS:
            raise CheckpointError("the adapter's state has a negative or huge step: it is of another adapter")
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.step = int(state[STEP])
        self.discard()

    @staticmethod
    def _check(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
        for name, tensor in own.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the adapter's state lacks {name[:100]} of shape {tuple(tensor.shape)}: it is of another adapter"
                )
            if not bool(found.isfinite().all()):
                raise CheckpointError(f"the adapter's state holds NaN or infinity in {name[:100]}; go back further")
