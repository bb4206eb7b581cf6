"""DiLoCo (Douillard et al., arXiv 2311.08105, algorithm 1): replicas train apart for H steps, then average how far they came.

Every replica steps by itself with the mean of its own microbatches' gradients. Every H steps the mean of the replicas' ways,
weighted by their microbatches, is taken as one gradient by an outer optimiser: SGD with Nesterov momentum. Here the ways are
exchanged with the norms that end a step, so before that step's own update, which then goes on from the averaged
parameters: its gradient is one step older than in the paper. The run ends with an averaging, after which nobody
steps any more: all replicas are equal.

Shape letters: N elements of a block's parameters, then its running statistics, strung together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.swarm.records.run import Averaging


class OuterOptimizer:
    """What all replicas agreed on last (`anchor_N`) and the momentum, float32. Changed by `update` only, at a commit.

    The first `trained` elements are parameters; statistics, behind them, are just averaged.
    """

    def __init__(self, values_N: Tensor, trained: int, averaging: Averaging) -> None:
        self.learning_rate = averaging.outer_lr
        self.momentum = averaging.outer_momentum
        self.anchor_N = values_N
        self.velocity_N = torch.zeros(trained, device=values_N.device)

    def __repr__(self) -> str:
        return f"OuterOptimizer({len(self.velocity_N)} parameters, lr {self.learning_rate}, momentum {self.momentum})"

    def way(self, values_N: Tensor) -> Tensor:
        """How far a replica came since the last averaging, in the direction of a gradient; written into `values_N`."""
        return torch.sub(self.anchor_N, values_N, out=values_N)

    def update(self, mean_way_N: Tensor) -> Tensor:
        """A step along the mean of the replicas' ways; the values with which all go on."""
        trained = len(self.velocity_N)
        mean_way_P = mean_way_N[:trained]
        self.velocity_N.mul_(self.momentum).add_(mean_way_P)
        self.anchor_N[:trained].sub_(mean_way_P, alpha=self.learning_rate)
        self.anchor_N[:trained].sub_(self.velocity_N, alpha=self.learning_rate * self.momentum)
        self.anchor_N[trained:].sub_(mean_way_N[trained:])
        return self.anchor_N
