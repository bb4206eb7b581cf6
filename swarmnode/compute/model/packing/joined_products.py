"""Products of several packed matrices with the same activations as one computation of ggml, at fixed places in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from swarmnode.compute.model.packing.ggml import (
    BUFFER_AT,
    DATA_AT,
    EXTRA_AT,
    F32,
    FORMATS,
    GgmlMatrix,
    Prepared,
    address_at,
    library,
    threads,
)

MOST_JOINED = 6  # a graph of ggml has room for their tensors


class FixedProduct(NamedTuple):
    """Fast product of a matrix (O, I) with activations x (R, I) and a result y (R, O) at fixed places."""

    matrix: GgmlMatrix
    x_RI: Tensor
    y_RO: Tensor


class JoinedProducts(Prepared):
    """Products with the same x, which are computed together. They keep the matrices, x and the results alive."""

    def __init__(self, products: Sequence[FixedProduct]) -> None:
        ggml = library()
        assert ggml is not None and len(products) <= MOST_JOINED
        super().__init__(ggml)
        self._products = list(products)
        rows, inputs = products[0].x_RI.shape
        x_of = {}
        for matrix, x_RI, y_RO in products:
            apart = matrix.takes_rows_apart(rows)
            if apart not in x_of:
                shape = (inputs, 1, rows, 1) if apart else (inputs, rows, 1, 1)
                x_of[apart] = ggml.new_tensor_4d(self.context, FORMATS[F32].number, *shape)
                address_at(x_of[apart] + DATA_AT).value = x_RI.data_ptr()
            weight = ggml.new_tensor(self.context, matrix.form.number, inputs, matrix.outputs)
            address_at(weight + DATA_AT).value = matrix.address
            if matrix.order is not None:
                address_at(weight + BUFFER_AT).value = matrix.order.buffer
                address_at(weight + EXTRA_AT).value = matrix.order.extra
            y = ggml.multiply(self.context, weight, x_of[apart])
            address_at(y + DATA_AT).value = y_RO.data_ptr()
            ggml.expand(self.graph, y)

    def __call__(self) -> None:
        """Compute all results from x. Raises RuntimeError if ggml fails."""
        threads().compute(self)
