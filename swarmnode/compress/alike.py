"""Payloads of several tensors of one shape, encoded and decoded together: on a card launches cost, not elements.

The bytes are those of `codecs.encode` for each tensor alone. Letters: S tensors, N elements of each, M bytes of its payload, G
groups with one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import FLOAT_DTYPES, INT8_GROUP, SCALE_BYTES, Codec, TensorInfo
from swarmnode.compress.blockwise import LEVELS, magnitudes, write_scales
from swarmnode.compress.codecs import DTYPE_OF, HALVES, TORCH_DTYPE

STEP_CODECS = {int(Codec.NONE), int(Codec.INT8), *HALVES}


def goes_together(info: TensorInfo) -> bool:
    """Return whether several tensors with this descriptor can be encoded and decoded together: floats, in a codec that steps of
    decoding use."""
    return info.dtype in FLOAT_DTYPES and prod(info.shape) > 0 and (info.codec in STEP_CODECS)


def info_of(tensor: Tensor, codec: Codec) -> TensorInfo | None:
    """Return the descriptor of a tensor in a codec without a parameter; None if nothing has its dtype."""
    dtype = DTYPE_OF.get(tensor.dtype)
    return None if dtype is None else TensorInfo(int(codec), int(dtype), tuple(tensor.shape))


def encode_alike(tensors: Sequence[Tensor], codec: Codec) -> Tensor:
    """Return the payloads uint8_SM of tensors of one shape, dtype and device. For descriptors that go together."""
    x_SN = torch.stack([tensor.detach().reshape(-1) for tensor in tensors])
    if codec == Codec.NONE:
        return x_SN.view(torch.uint8)
    if codec in HALVES:
        return x_SN.to(HALVES[codec]).view(torch.uint8)
    count = x_SN.shape[1]
    x_SGW = _in_groups(x_SN, INT8_GROUP).unflatten(1, (-1, INT8_GROUP))
    payload_SM = torch.empty(
        len(x_SN), x_SGW.shape[1] * (SCALE_BYTES + INT8_GROUP), dtype=torch.uint8, device=x_SN.device
    )
    scales_SG1, codes_SGW = _parts(payload_SM)
    work_SGW = magnitudes(x_SGW)
    inverse_SG1 = write_scales(work_SGW.amax(2, keepdim=True), LEVELS, scales_SG1)
    codes_SGW.copy_(torch.mul(x_SGW, inverse_SG1, out=work_SGW).round_())
    return payload_SM[:, : x_SGW.shape[1] * SCALE_BYTES + count]  # the last group may be cut short


def _in_groups(x_SN: Tensor, width: int) -> Tensor:
    """Return the rows, padded with zeros to a multiple of `width`."""
    missing = -x_SN.shape[1] % width
    return pad(x_SN, (0, missing)) if missing else x_SN


def decode_alike(info: TensorInfo, payload_SM: Tensor) -> Tensor:
    """Return tensors (S, *shape) of payloads with one descriptor, which goes together. The lengths have been checked."""
    dtype = TORCH_DTYPE[info.dtype]
    if info.codec == Codec.NONE:
        x = payload_SM.contiguous().view(dtype)
    elif info.codec in HALVES:
        x = payload_SM.contiguous().view(HALVES[info.codec]).to(dtype)
    else:
        count = prod(info.shape)
        scales_SG1, codes_SGW = _parts(_in_groups(payload_SM, -(-count // INT8_GROUP) * (SCALE_BYTES + INT8_GROUP)))
        x = torch.empty(codes_SGW.shape, dtype=dtype, device=payload_SM.device)
        x = torch.mul(codes_SGW, scales_SG1.float(), out=x).flatten(1)[:, :count]
    return x.reshape(len(payload_SM), *info.shape)


def _parts(payload_SM: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of payloads in INT8: their scales bfloat16_SG1, which come first, and their codes int8_SGW."""
    groups = payload_SM.shape[1] // (SCALE_BYTES + INT8_GROUP)
    scales_SG1 = payload_SM[:, : groups * SCALE_BYTES].view(torch.bfloat16)[:, :, None]
    codes_SGW = payload_SM[:, groups * SCALE_BYTES :].unflatten(1, (groups, INT8_GROUP)).view(torch.int8)
    return scales_SG1, codes_SGW
