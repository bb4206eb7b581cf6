"""Muon (https://kellerjordan.github.io/posts/muon/): momentum whose singular values are set to about 1, for weight matrices.

The learning rate of a matrix is scaled so that its update is as large as AdamW's (arXiv 2502.16982): one `--lr` serves both.
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` computes the same with bfloat16 products. Here products are float32: in
bfloat16, a difference of 1e-7 between two replicas would become one of 1e-2 of an update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic polynomial
ITERATIONS = 5
SMALLEST_NORM = 1e-7
ADAMW_RMS = 0.2  # root mean square of AdamW's updates
NO_MATRICES = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*embed_out*", "*score.*", "*classifier*")
"""Patterns of the names of embeddings and heads, which AdamW updates"""
EXPERTS = "*experts*"
"""Pattern of the names of fused experts: parameters (experts, outputs, inputs)"""


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter. AdamW updates embeddings, heads, norms and biases."""
    return parameter.dim() >= 2 and not any(fnmatchcase(name, pattern) for pattern in NO_MATRICES)


def matrices(name: str, tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of the matrices in a parameter: each of fused experts, otherwise one with a row for each output."""
    if tensor.dim() == 3 and fnmatchcase(name, EXPERTS):
        yield from tensor
    else:
        yield tensor.view(len(tensor), -1)


def working_bytes(name: str, parameter: Tensor) -> int:
    """Return the bytes of temporary tensors in an update of `parameter`: three as large as the matrix, and two products."""
    rows, columns = next(matrices(name, parameter)).shape
    return (3 * rows * columns + 2 * min(rows, columns) ** 2) * parameter.element_size()


def orthogonalize(matrix_RC: Tensor) -> Tensor:
    """Return a float32 matrix_RC with the same singular vectors, and singular values of about 0.7 to 1.2.

    Newton-Schulz iteration; zeros stay zeros.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix_RC.size(0) > matrix_RC.size(1)
    x_MN = matrix_RC.T if is_tall else matrix_RC
    x_MN = x_MN / x_MN.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram_MM = x_MN @ x_MN.T
        polynomial_MM = torch.addmm(gram_MM, gram_MM, gram_MM, beta=b, alpha=c)
        x_MN = torch.addmm(x_MN, polynomial_MM, x_MN, beta=a)
    return x_MN.T if is_tall else x_MN


def muon(
    name: str,
    parameter: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    beta: float,
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Update a parameter and its `momentum` of the same shape in place. `beta`: the share of the momentum that is kept."""
    views = (matrices(name, tensor) for tensor in (parameter, gradient, momentum))
    for parameter_RC, gradient_RC, momentum_RC in zip(*views, strict=True):
        momentum_RC.lerp_(gradient_RC, 1 - beta)
        update_RC = orthogonalize(gradient_RC.lerp(momentum_RC, beta))  # Nesterov's
        parameter_RC.mul_(1 - learning_rate * weight_decay)
        parameter_RC.sub_(update_RC, alpha=learning_rate * ADAMW_RMS * math.sqrt(max(parameter_RC.shape)))
