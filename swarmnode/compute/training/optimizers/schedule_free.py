"""Schedule-free AdamW (arXiv 2405.15682): a constant learning rate, and an average of the iterates in place of a schedule.

Gradients are computed at y; AdamW moves z; x is the average of z, and y lies between both: y = (1 - beta1) z + beta1 x. The
parameters are y until the last step, which sets them to x. The memory is z - y, because it begins at zero whatever the parameters
are.
"""

from __future__ import annotations

from torch import Tensor

from swarmnode.swarm.records.run import Run


def newest_share(run: Run, step: int) -> float:
    """Return the share of the iterate of step `step` (from 0) in the average. Iterates weigh by their squared learning rates, which
    rise within the warm-up and then stay."""

    def factor_at(step: int) -> float:
        return run.known_recipe.factor_at(step, run.steps, run.warmup_steps, run.final_share)

    warmup = run.warmup_steps
    count = (
        round(factor_at(min(step, warmup - 1)) * warmup) if warmup else 0
    )  # the last rate of the warm-up, in its units
    total = count * (count + 1) * (2 * count + 1) / 6 / warmup**2 if warmup else 0.0
    total += max(0, step - warmup + 1)
    return float(factor_at(step) ** 2 / total) if total else 0.0


def schedule_free(
    parameter: Tensor,
    gradient: Tensor,
    *,
    exp_avg_sq: Tensor,
    z_minus_y: Tensor,
    run: Run,
    step: int,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its memories in place, at the end of step `step` (from 0). The last step of `run` sets it to x."""
    beta, beta_sq = run.betas
    share = newest_share(run, step)
    exp_avg_sq.mul_(beta_sq).addcmul_(gradient, gradient, value=1 - beta_sq)
    divisor = exp_avg_sq.div(1 - beta_sq ** (step + 1)).sqrt_().add_(run.epsilon)
    way = divisor.reciprocal_().mul_(gradient).add_(parameter, alpha=weight_decay)
    parameter.add_(z_minus_y, alpha=share).sub_(way, alpha=learning_rate * (1 - beta * (1 - share)))
    z_minus_y.sub_(way, alpha=learning_rate * beta).mul_(1 - share)
    if step == run.steps - 1:
        parameter.add_(z_minus_y, alpha=1 - 1 / beta)
