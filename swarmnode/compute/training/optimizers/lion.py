"""Lion (arXiv 2302.06675): each parameter moves by the learning rate, in the direction of the sign of its momentum."""

from __future__ import annotations

from torch import Tensor


def lion(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    *,
    betas: tuple[float, float],
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its momentum `exp_avg` in place.

    `betas`: the shares of the momentum that are kept, in the direction of this update, and for the next one.
    """
    parameter.mul_(1 - learning_rate * weight_decay)
    parameter.sub_(exp_avg.lerp(gradient, 1 - betas[0]).sign_(), alpha=learning_rate)
    exp_avg.lerp_(gradient, 1 - betas[1])
