"""int8: block-wise absolute maximum, one bfloat16 scale for each group of 64 elements (`protocol/tensors.md`).

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.1; with a linear map
instead of their dynamic one, which is nearer to the original on activations and much faster in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarmnode.codec.tensors import INT8_GROUP, SCALE_BYTES
from swarmnode.compress.blocks import in_pieces, magnitudes, rows_of, scales_and_codes, write_scales

LEVELS = 127


def encode_int8(x_N: Tensor) -> Tensor:
    """Payload uint8_M on x's device: scales bfloat16_G, then codes int8_N."""
    x_GW = rows_of(x_N, INT8_GROUP)
    groups = x_GW.shape[0]
    payload_M = torch.empty(groups * (SCALE_BYTES + INT8_GROUP), dtype=torch.uint8, device=x_N.device)
    in_pieces(_encode_groups, x_GW, *scales_and_codes(payload_M, groups))
    return payload_M[: groups * SCALE_BYTES + x_N.numel()]


def _encode_groups(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    work_GW = magnitudes(x_GW)
    inverse_G1 = write_scales(work_GW.amax(1, keepdim=True), LEVELS, scales_G1)
    codes_GC.view(torch.int8).copy_(torch.mul(x_GW, inverse_G1, out=work_GW).round_())


def decode_int8(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype`; a group whose scale is not finite decodes to values that are not finite either."""
    groups = -(-count // INT8_GROUP)
    x_GW = torch.empty(groups, INT8_GROUP, dtype=dtype, device=payload_M.device)
    payload_M = rows_of(payload_M, groups * (SCALE_BYTES + INT8_GROUP)).view(-1)  # the last group may be cut short
    in_pieces(_decode_groups, x_GW, *scales_and_codes(payload_M, groups))
    return x_GW.view(-1)[:count]


def _decode_groups(x_GW: Tensor, scales_G1: Tensor, codes_GC: Tensor) -> None:
    torch.mul(codes_GC.view(torch.int8), scales_G1.float(), out=x_GW)
