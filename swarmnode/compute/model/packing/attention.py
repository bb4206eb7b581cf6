"""Attention on the CPU whose result for a position depends on nothing but that position's own past, to the last bit.

Fast products round activations to 8 bits, which turns the smallest difference into a whole step. So a session has the same text in
any company, and after a failover, only if all operations between products give a position the same bits whatever else a pass
computes. torch's attention adds in an order that depends on the number of queries and columns. ggml's flash attention goes through
the columns of each query one by one, skips those that are masked, and takes each query alone if it is a row of its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.packing.ggml import (
    DATA_AT,
    FORMATS,
    SIZES_AT,
    STRIDES_AT,
    Prepared,
    address_at,
    library,
    numbers_at,
    threads,
)
from swarmnode.compute.model.trace import check_attention

with lean():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

BY_POSITION = "swarmnode_by_position"
NUMBERS = {torch.float32: FORMATS["F32"].number, torch.bfloat16: FORMATS["BF16"].number}
MASK_NUMBER = FORMATS["F16"].number


class _Attention(Prepared):
    """Attention of N queries, each of H heads, to keys and values of G heads in ggml's format `number`."""

    def __init__(
        self, ggml: Any, number: int, queries: int, heads: int, groups: int, width: int, value_width: int, scale: float
    ) -> None:
        super().__init__(ggml)
        q = ggml.new_tensor_4d(self.context, NUMBERS[torch.float32], width, 1, heads, queries)
        k, v = (ggml.new_tensor_4d(self.context, number, each, 1, groups, queries) for each in (width, value_width))
        mask = ggml.new_tensor_4d(self.context, MASK_NUMBER, 1, 1, 1, queries)
        y = ggml.attend(self.context, q, k, v, mask, scale, 0.0, 0.0)
        ggml.expand(self.graph, y)
        self._places = [address_at(tensor + DATA_AT) for tensor in (q, k, v, mask, y)]
        self._sizes = [numbers_at(tensor + SIZES_AT) for tensor in (k, v, mask)]
        self._strides = [numbers_at(tensor + STRIDES_AT) for tensor in (k, v, mask)]

    def place(self, tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], *, shared: bool) -> None:
        """Take (q, k, v, mask, y). The queries belong to different rows, or to the same one if `shared`."""
        _, k, v, mask_NC, _ = tensors
        for place, tensor in zip(self._places, tensors, strict=True):
            place.value = tensor.data_ptr()
        for sizes, strides, tensor in zip(self._sizes, self._strides, (k, v), strict=False):
            size_bytes, (by_row, by_head, by_column, _) = tensor.element_size(), tensor.stride()
            sizes[1] = tensor.shape[2]
            strides[1], strides[2] = size_bytes * by_column, size_bytes * by_head
            strides[3] = 0 if shared else size_bytes * by_row
        self._sizes[2][0] = mask_NC.shape[1]
        for dimension in (1, 2, 3):
            self._strides[2][dimension] = mask_NC.element_size() * mask_NC.shape[1]

    def __call__(self) -> None:
        """Compute y of the tensors that were placed last."""
        threads().compute(self)


def attention_by_position(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention (B, T, H, W) of queries (B, H, T, D) to keys (B, G, C, D) and values (B, G, C, W), and None.

    This is what transformers expects. `attention_mask` is float16 (B, 1, T, C): 0 for columns that count, else minus infinity. None
    if all before the position count. Attention with a dropout or a position bias is torch's. So is attention that takes gradients,
    or a mask of another dtype as in training. Raises ValueError if ggml cannot take these shapes.
    """
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    has_other_mask = attention_mask is not None and attention_mask.dtype != torch.float16
    if (
        trains
        or has_other_mask
        or dropout
        or kwargs.get("position_bias") is not None
        or kwargs.get("is_causal") is False
    ):
        mask = None if attention_mask is None else attention_mask.to(query.dtype)
        y, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scaling, **kwargs)
        return y, None
    check_attention(query.shape, key.shape, value.shape)
    if key.dtype not in NUMBERS or not key.stride(-1) == value.stride(-1) == 1:
        key, value = key.float().contiguous(), value.float().contiguous()
    rows, heads, count, width = query.shape
    q_BTHD = query.transpose(1, 2).float().contiguous()
    mask_BTC = _full_mask(attention_mask, rows, count, key.shape[2])
    y_BTHW = torch.empty(rows, count, heads, value.shape[3])
    scale = 1 / math.sqrt(width) if scaling is None else scaling
    kind = NUMBERS[key.dtype], rows if count == 1 else count, heads, key.shape[1], width, value.shape[3], scale
    parts = [slice(None)] if count == 1 else [slice(row, row + 1) for row in range(rows)]
    for part in parts:
        mask_NC, y = mask_BTC[part].view(-1, mask_BTC.shape[2]), y_BTHW[part]
        _attend((q_BTHD[part], key[part], value[part], mask_NC, y), kind, shared=count > 1)
    return y_BTHW.to(query.dtype), None


def _attend(tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], kind: tuple[Any, ...], *, shared: bool) -> None:
    here = threads()
    if here.recorder is None:
        prepared = here.prepared(_Attention, *kind)
    else:
        ggml = library()
        assert ggml is not None
        prepared = _Attention(ggml, *kind)
        here.recorder.note(prepared, tensors[-1])
    prepared.place(tensors, shared=shared)
    prepared()


def _full_mask(mask: Tensor | None, rows: int, count: int, columns: int) -> Tensor:
    """Return the mask (B, T, C) of a causal pass whose queries belong to the last columns, unless one is given."""
    if mask is not None:
        return mask.expand(rows, 1, count, columns).reshape(rows, count, columns)
    hidden_TC = torch.full((count, columns), -math.inf, dtype=torch.float16).triu_(columns - count + 1)
    return hidden_TC.expand(rows, count, columns).contiguous()


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return transformers' mask as `attention_by_position` takes it."""
    mask: Tensor | None = sdpa_mask(*args, **kwargs)
    if mask is None:
        return None
    hidden = torch.full((), -math.inf, dtype=torch.float16)
    return torch.where(mask, torch.zeros((), dtype=torch.float16), hidden).contiguous()


def attend_by_position(model: Any) -> None:
    """Let a model compute attention in this way, if its family leaves the choice and torch's attention would be used."""
    if library() is None or model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return
    ALL_ATTENTION_FUNCTIONS.register(BY_POSITION, attention_by_position)
    ALL_MASK_ATTENTION_FUNCTIONS.register(BY_POSITION, _mask)
    model.config._attn_implementation = BY_POSITION
