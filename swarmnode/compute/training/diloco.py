"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): replicas train apart for H steps, then average how far they came.

Every replica steps by itself with the mean of its own microbatches' gradients. After H steps the mean of the replicas' ways,
weighted by their samples, is taken as one gradient by an outer optimiser: SGD with Nesterov momentum.

Shape letters: N elements of all parameters of some blocks together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarmnode.errors import CheckpointError
from swarmnode.swarm.run import Averaging


class OuterOptimizer:
    """Outer parameters and momentum, float32, the same on all replicas. Changes by `update` only, after the commit."""

    def __init__(self, parameters_N: Tensor, averaging: Averaging) -> None:
        self.learning_rate = averaging.outer_lr
        self.momentum = averaging.outer_momentum
        self._parameters_N = parameters_N.detach().clone()
        self._velocity_N = torch.zeros_like(self._parameters_N)

    def __repr__(self) -> str:
        return (
            f"OuterOptimizer({len(self._parameters_N)} parameters, lr {self.learning_rate}, momentum {self.momentum})"
        )

    def delta(self, local_N: Tensor) -> Tensor:
        """How far a replica came since the last averaging, as a gradient: to be averaged, weighted by samples."""
        return self._parameters_N - local_N

    def update(self, mean_delta_N: Tensor) -> Tensor:
        """A step along the mean of the replicas' deltas; a copy of the parameters with which all go on."""
        self._velocity_N.mul_(self.momentum).add_(mean_delta_N)
        self._parameters_N.sub_(mean_delta_N + self.momentum * self._velocity_N, alpha=self.learning_rate)
        return self._parameters_N.clone()

    def state(self) -> dict[str, Tensor]:
        """What is remembered, by name: references."""
        return {"parameters": self._parameters_N, "velocity": self._velocity_N}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over a copy of a state. Raises CheckpointError, changing nothing, where it does not fit."""
        own = self.state()
        if own.keys() != tensors.keys() or any(own[name].shape != tensors[name].shape for name in own):
            shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
            raise CheckpointError(
                f"the outer optimiser of {len(self._parameters_N)} parameters cannot go on from {shapes}"
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
