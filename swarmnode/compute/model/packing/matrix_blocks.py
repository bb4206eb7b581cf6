"""Matrices of frozen linear layers, read in blocks whatever form they are held in, and products with them that gradients pass.

The forward product of a frozen layer may be any kernel. Its gradient with regard to the inputs needs the matrix itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Block = tuple[slice, slice, Tensor]
"""Outputs, inputs, and values of a part of a matrix (O, I)"""
Blocks = Callable[[], Iterator[Block]]

TILE = 256  # rows or columns of a matrix that are read at a time


class _FrozenProduct(torch.autograd.Function):
    """Product of activations with a matrix that takes no gradient. Nothing is kept for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], blocks: Blocks) -> Tensor:
        """Return multiply(x)."""
        ctx.blocks, ctx.inputs = blocks, x.shape[-1]
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient (..., I) of the activations for that of the result (..., O)."""
        gradient_RO = gradients[0].reshape(-1, gradients[0].shape[-1])
        back_RI: Tensor | None = None
        for outputs, inputs, block in ctx.blocks():
            if outputs == inputs == slice(None):  # the whole matrix
                back_RI = gradient_RO @ block.to(gradient_RO.dtype)
                break
            back_RI = gradient_RO.new_zeros(len(gradient_RO), ctx.inputs) if back_RI is None else back_RI
            back_RI[:, inputs].addmm_(gradient_RO[:, outputs], block.to(back_RI.dtype))
        assert back_RI is not None
        return back_RI.view(*gradients[0].shape[:-1], ctx.inputs), None, None


def frozen_product(x: Tensor, multiply: Callable[[Tensor], Tensor], blocks: Blocks) -> Tensor:
    """Return multiply(x), for x (..., I) and a result (..., O), with a gradient for `x` if it takes one.

    `blocks` yields the matrix that `multiply` uses, without its bias.
    """
    if x.requires_grad and torch.is_grad_enabled():
        return _FrozenProduct.apply(x, multiply, blocks)  # type: ignore[no-any-return,no-untyped-call]
    return multiply(x)


def tiles(matrix_OI: Tensor) -> Iterator[Block]:
    """Yield a plain matrix as one block."""
    yield slice(None), slice(None), matrix_OI


def probed(multiply: Callable[[Tensor], Tensor], inputs: int, one: float, like: Tensor) -> Iterator[Block]:
    """Yield the columns of a matrix that only multiplies, by its products with unit vectors times `one`.

    The products have no bias. Unit vectors have the dtype and device of `like`. Costs as much as a prompt of I positions.
    """
    for first in range(0, inputs, TILE):
        count = min(TILE, inputs - first)
        units_KI = torch.zeros(count, inputs, dtype=like.dtype, device=like.device)
        units_KI[:, first : first + count].fill_diagonal_(one)
        yield slice(None), slice(first, first + count), (multiply(units_KI) / one).t()
