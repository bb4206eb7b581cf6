"""Weights, gradients and moments of one adapter on one span, each strung together in one vector, and their updates by AdamW."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from swarmnode.compute.executor import ByPiece
from swarmnode.compute.training.adapters.recipe import MOST_FLOAT, AdapterRecipe
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
PIECE_ELEMENTS = 1 << 22
"""Most elements that a piece of work draws, copies or updates: some hundredths of a second on a CPU"""
PIECE_PRODUCTS = 1 << 30
"""Most products of two numbers in a piece of work besides passes: about a tenth of a second on a CPU"""


def portions(groups: Iterable[Sequence[Tensor]]) -> Iterator[list[tuple[Tensor, ...]]]:
    """Yield flat parts of the tensors of each group, which have equal sizes, side by side: at most `PIECE_ELEMENTS` at a time."""
    portion: list[tuple[Tensor, ...]] = []
    room = PIECE_ELEMENTS
    for tensors in groups:
        for parts in zip(*(tensor.reshape(-1).split(PIECE_ELEMENTS) for tensor in tensors), strict=True):
            if len(parts[0]) > room:
                yield portion
                portion, room = [], PIECE_ELEMENTS
            portion.append(parts)
            room -= len(parts[0])
    if portion:
        yield portion


def copied(pairs: Iterable[tuple[Tensor, Tensor]]) -> ByPiece[None]:
    """Copy into the first tensor of each pair the second one."""
    for portion in portions(pairs):
        for into_N, from_N in portion:
            into_N.copy_(from_N)
        yield


class AdapterWeights:
    """Trained tensors of an adapter, by name: float32 views of one vector each of weights, gradients and AdamW's moments.

    `step` is the number of updates. `tensors` are the weights, zero at first, and take gradients; they are written only by their
    start, updates and loads. `unit` is the span's first, for errors. Work on whole vectors goes by piece.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], device: torch.device, *, unit: int) -> None:
        self.step = 0
        self._unit = unit
        self._shapes = {name: torch.Size(shape) for name, shape in sorted(shapes.items())}
        size = sum(shape.numel() for shape in self._shapes.values())
        self._weight_N, self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N = (
            torch.zeros(size, device=device) for _ in range(4)
        )
        self.tensors = self._views(self._weight_N)
        self.gradients = self._views(self._gradient_N)
        for tensor in self.tensors.values():
            tensor.requires_grad_()

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
    def accumulate(self, gradients: Mapping[str, Tensor]) -> ByPiece[None]:
        """Add one microbatch's gradients to the step's sums. Raises NotFinite, adding nothing, if one is NaN or infinite."""
        for portion in portions((gradient,) for gradient in gradients.values()):
            if not is_finite([part for (part,) in portion]):
                raise self._not_finite("holds NaN or infinity")
            yield
        for portion in portions((self.gradients[name], gradient) for name, gradient in gradients.items()):
            for sum_N, part_N in portion:
                sum_N.add_(part_N)
            yield

    def _not_finite(self, what: str) -> NotFinite:
        text = f"the adapter's gradient {what}; lower --lr or --clip, or check the data"
        return NotFinite(text, unit=self._unit)

    def discard(self) -> ByPiece[None]:
        """Set the step's sums of gradients to zero."""
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            part_N.zero_()
            yield

    def gradient_square(self) -> ByPiece[float]:
        """Return the square of the norm of the step's gradient. Raises NotFinite if it is NaN or infinite."""
        norms = []
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            norms.append(torch.linalg.vector_norm(part_N).item())
            yield
        square = math.fsum(norm * norm for norm in norms)
        if not square <= MOST_FLOAT**2:
            raise self._not_finite("is too large for float32")
        return square

    @torch.no_grad()
    def update(
        self, recipe: AdapterRecipe, learning_rate: float, factors: Mapping[str, Tensor], scale: float
    ) -> ByPiece[None]:
        """Update the weights by the step's gradient times `scale`, and set the sums to zero.

        `factors` are matrices (R, R) that the gradients of some matrices (O, R) are multiplied with first.
        """
        for part_N in self._gradient_N.split(PIECE_ELEMENTS):
            part_N.mul_(scale)
            yield
        for name, factor_RR in factors.items():
            for part_OR in self.gradients[name].split(max(1, PIECE_PRODUCTS // factor_RR.numel())):
                part_OR.copy_(part_OR @ factor_RR)
                yield
        vectors = (self._weight_N, self._gradient_N, self._exp_avg_N, self._exp_avg_sq_N)
        for parts in zip(*(vector_N.split(PIECE_ELEMENTS) for vector_N in vectors), strict=True):
            if len(parts[0]):
                update_adamw(
                    *([part_N] for part_N in parts),
                    step=self.step,
                    learning_rate=learning_rate,
                    betas=recipe.betas,
                    weight_decay=recipe.weight_decay,
                    epsilon=recipe.epsilon_at(self.step),
                )
            parts[1].zero_()
            yield
        self.step += 1

    def state(self) -> dict[str, Tensor]:
        """Return weights, moments and the number of updates, by name: references, not copies."""
        named = zip(VECTORS, self._vectors, strict=True)
        tensors = {f"{kind}/{name}": view for kind, vector_N in named for name, view in self._views(vector_N).items()}
        return {**tensors, STEP: torch.tensor(self.step)}

    @torch.no_grad()
    def load_gradients(self, gradients: Mapping[str, Tensor]) -> ByPiece[None]:
        """Replace the step's sums of gradients by `gradients`, which have the names of the weights.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        yield from self._check(self.gradients, gradients)
        yield from copied((tensor, gradients[name]) for name, tensor in self.gradients.items())

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> ByPiece[None]:
        """Load a state, bit for bit, and forget gradients. Other tensors in `state` are ignored.

        Raises CheckpointError, changing nothing, if a tensor is missing, has another shape or dtype, or is NaN or infinite.
        """
        own = self.state()
        yield from self._check(own, state)
        if not 0 <= int(state[STEP]) <= MOST_STEPS:
            raise CheckpointError("the adapter's state has a negative or huge step: it is of another adapter")
        yield from copied((tensor, state[name]) for name, tensor in own.items())
        self.step = int(state[STEP])
        yield from self.discard()

    @staticmethod
    def _check(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> ByPiece[None]:
        for name, tensor in own.items():
            found = state.get(name)
            if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise CheckpointError(
                    f"the adapter's state lacks {name[:100]} of shape {tuple(tensor.shape)}: it is of another adapter"
                )
        unseen = 0  # elements since the last piece
        for name in own:
            for part_N in state[name].reshape(-1).split(PIECE_ELEMENTS):
                if not bool(part_N.isfinite().all()):
                    raise CheckpointError(f"the adapter's state holds NaN or infinity in {name[:100]}; go back further")
                unseen += len(part_N)
                if unseen >= PIECE_ELEMENTS:
                    yield
                    unseen = 0
