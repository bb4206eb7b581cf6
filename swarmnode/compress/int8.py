"""int8: block-wise absolute maximum, one bfloat16 scale for each group of 64 elements (`protocol/tensors.md`).

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861, section 2.1; with a linear map
instead of their dynamic one, which is nearer to the original on activations and much faster in plain torch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swarmnode.codec.tensors import INT8_GROUP, SCALE_BYTES, Codec, encoded_bytes
from swarmnode.compress.scales import group_scales, piece_rows

LEVELS = 127


def encode_int8(x_N: Tensor) -> Tensor:
    """Payload uint8_M on x's device: scales bfloat16_G, then codes int8_N."""
    count = x_N.numel()
    payload_M = torch.empty(encoded_bytes(Codec.INT8, 0, count, 0), dtype=torch.uint8, device=x_N.device)
    scales_G1, codes_N = _parts(payload_M, count)
    for x_GW, scale_G1, codes_GW in _pieces(x_N, scales_G1, codes_N):
        work_GW = x_GW.float().abs() if x_GW.dtype != torch.float32 else x_GW.abs()
        scale_G1.copy_(group_scales(work_GW, LEVELS))
        torch.mul(x_GW, scale_G1.float().reciprocal_(), out=work_GW)
        codes_GW.copy_(work_GW.round_())
    return payload_M


def decode_int8(payload_M: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """x_N of `dtype`; a group whose scale is not finite decodes to values that are not finite either."""
    scales_G1, codes_N = _parts(payload_M, count)
    x_N = torch.empty(count, dtype=dtype, device=payload_M.device)
    for x_GW, scale_G1, codes_GW in _pieces(x_N, scales_G1, codes_N):
        torch.mul(codes_GW, scale_G1.float(), out=x_GW)
    return x_N


def _parts(payload_M: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The payload's scales bfloat16_G1 and codes int8_N, as views."""
    scale_bytes = SCALE_BYTES * -(-count // INT8_GROUP)
    return payload_M[:scale_bytes].view(torch.bfloat16).unsqueeze(1), payload_M[scale_bytes:].view(torch.int8)


def _pieces(x_N: Tensor, scales_G1: Tensor, codes_N: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """(x_GW, scales_G1, codes_GW) piece by piece, all of them views; a last group that is not full comes alone."""
    count = x_N.numel()
    whole = count - count % INT8_GROUP
    rows = piece_rows(INT8_GROUP, x_N.device)
    if whole:
        yield from zip(
            torch.split(x_N[:whole].view(-1, INT8_GROUP), rows),
            torch.split(scales_G1[: whole // INT8_GROUP], rows),
            torch.split(codes_N[:whole].view(-1, INT8_GROUP), rows),
            strict=True,
        )
    if whole < count:
        yield x_N[whole:].view(1, -1), scales_G1[-1:], codes_N[whole:].view(1, -1)
