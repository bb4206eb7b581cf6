"""Tensor to payload and back, by codec: `encode` on the sender's compute thread, `decode` on the receiver's.

Both run on the tensor's device (CPU or CUDA); only encoded bytes cross between host and device.

Payloads of several tensors of one shape, encoded and decoded together: on a card launches cost, not elements.

The bytes are those of `encode` for each tensor alone. Letters: S tensors, N elements of each, M bytes of its payload, G
groups with one scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Union

import torch
from torch import Tensor
from torch.nn.functional import pad

from swarmnode.codec.tensors import (
    FLOAT_DTYPES,
    INT8_GROUP,
    MAX_ELEMENTS,
    SCALE_BYTES,
    Codec,
    DType,
    TensorInfo,
    check_tensor,
    payload_bytes,
)
from swarmnode.compress.blockwise import (
    LEVELS,
    decode_int2,
    decode_int4,
    decode_int8,
    decode_small_int8,
    encode_int2,
    encode_int4,
    encode_int8,
    encode_small_int8,
    is_few,
    is_small,
    magnitudes,
    write_scales,
)
from swarmnode.compress.topk import decode_topk, decode_topk2, encode_topk, encode_topk2, largest_only
from swarmnode.errors import ProtocolError

__all__ = ["Buffer", "decode", "decode_in_place", "encode", "encode_in_place", "payload_bytes", "to_buffer"]

Buffer = Union[bytes, bytearray, memoryview]

ALIGNMENT_BYTES = 8
COPY_BYTES = 1 << 16  # a smaller payload is copied: cheaper than a view, and it keeps no tensor alive

DTYPE_OF = {
    torch.float32: DType.FLOAT32,
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.int64: DType.INT64,
    torch.int32: DType.INT32,
    torch.uint8: DType.UINT8,
}
TORCH_DTYPE = {int(code): dtype for dtype, code in DTYPE_OF.items()}

HALVES = {int(Codec.BF16): torch.bfloat16, int(Codec.FP16): torch.float16}
"""Dtypes of the codecs that only round. A finite value beyond float16's range becomes infinite, which the receiver notices;
bfloat16 has the range of float32."""
LARGEST_IN_FP16 = torch.finfo(torch.float16).max

BLOCKWISE = {
    int(Codec.INT8): (encode_int8, decode_int8),
    int(Codec.INT4): (encode_int4, decode_int4),
    int(Codec.INT2): (encode_int2, decode_int2),
}
SPARSE = {int(Codec.TOPK): (encode_topk, decode_topk), int(Codec.TOPK2): (encode_topk2, decode_topk2)}

_SMALL = (int(Codec.INT8), int(DType.FLOAT32))


def encode(tensor: Tensor, codec: Codec, *, param: int = 0) -> tuple[TensorInfo, Buffer]:
    """Return the descriptor and the payload of a tensor of any shape, strides and device.

    Args:
        tensor: The tensor. With codec NONE a large payload is a view of its memory, which must not change before it is sent.
        codec: The encoding.
        param: The codec's own parameter (top-k: elements to keep; the descriptor has the actual number).

    Raises:
        ValueError: The codec does not carry the tensor's dtype.
    """
    if codec == Codec.INT8 and is_small(tensor) and (payload := encode_small_int8(tensor)) is not None:
        return TensorInfo(*_SMALL, tuple(tensor.shape)), payload
    info, payload_M = encode_in_place(tensor, codec, param=param)
    return info, to_buffer(payload_M)


def encode_in_place(tensor: Tensor, codec: Codec, *, param: int = 0) -> tuple[TensorInfo, Tensor]:
    """Return the descriptor and the payload uint8_M on the tensor's device, so that a caller with several brings them to the host
    at once.

    Arguments as of `encode`. Raises ValueError if the codec does not carry the tensor's dtype.
    """
    dtype = DTYPE_OF.get(tensor.dtype)
    if dtype is None or (codec != Codec.NONE and dtype not in FLOAT_DTYPES):
        raise ValueError(f"codec {Codec(codec).name} does not carry tensors of {tensor.dtype}")
    shape = tuple(tensor.shape)
    if codec == Codec.INT8 and is_small(tensor) and (payload := encode_small_int8(tensor)) is not None:
        return TensorInfo(int(codec), int(dtype), shape), torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if not tensor.numel():
        return TensorInfo(int(codec), int(dtype), shape), torch.empty(0, dtype=torch.uint8)
    with torch.inference_mode():  # cheaper than no_grad; no caller computes gradients with the payload
        x_N, kept = tensor.detach().reshape(-1), 0
        if codec in SPARSE:
            payload_M, kept = SPARSE[codec][0](x_N, param)
        elif codec in BLOCKWISE:
            payload_M = BLOCKWISE[codec][0](x_N)
        else:
            payload_M = (x_N if codec == Codec.NONE else x_N.to(HALVES[codec])).view(torch.uint8)
    return TensorInfo(int(codec), int(dtype), shape, kept), payload_M


def to_buffer(payload_M: Tensor) -> Buffer:
    """Return a payload's bytes on the host; those of a large one are a view of the tensor's memory."""
    payload = payload_M.cpu().numpy()
    return payload.tobytes() if payload.nbytes < COPY_BYTES else payload.data


def decode(
    info: TensorInfo,
    payload: Buffer,
    *,
    device: torch.device | str = "cpu",
    max_elements: int = MAX_ELEMENTS,
) -> Tensor:
    """Return the tensor of a descriptor and its payload, with its original dtype and shape, on `device`.

    Every length is checked before anything is allocated. With codec NONE, a writable payload and the CPU the tensor is a view of
    the payload's memory. Raises ProtocolError: TOO_LARGE over `max_elements`, MALFORMED in all other cases.
    """
    length = memoryview(payload).nbytes
    _check_length(info, length, max_elements)
    if not length:
        return torch.empty(info.shape, dtype=TORCH_DTYPE[info.dtype], device=device)
    if (info.codec, info.dtype) == _SMALL and is_few(count := prod(info.shape)) and torch.device(device).type == "cpu":
        x = decode_small_int8(payload, info.shape, count)
        if x is not None:
            return x
    return _decode_flat(info, _from_buffer(payload, torch.device(device))).view(info.shape)


def decode_in_place(info: TensorInfo, payload_M: Tensor, *, max_elements: int = MAX_ELEMENTS) -> Tensor:
    """Return the tensor of a payload (uint8) that is on its device already. Raises ProtocolError as `decode`."""
    _check_length(info, payload_M.nbytes, max_elements)
    if not payload_M.numel():
        return torch.empty(info.shape, dtype=TORCH_DTYPE[info.dtype], device=payload_M.device)
    return _decode_flat(info, payload_M).view(info.shape)


def _check_length(info: TensorInfo, length: int, max_elements: int) -> None:
    expected = check_tensor(info, max_elements)
    if length != expected:
        raise ProtocolError(f"a payload has {length} bytes; its descriptor {info} implies {expected}")


def _from_buffer(payload: Buffer, device: torch.device) -> Tensor:
    view = memoryview(payload)
    # torch warns about read-only memory; unaligned views are slow or refused on some machines. One copy avoids both.
    payload_M = torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)
    if device.type != "cpu":  # CUDA has copied pageable memory when it returns, so non_blocking is safe
        return payload_M.to(device, non_blocking=device.type == "cuda")
    return payload_M if payload_M.data_ptr() % ALIGNMENT_BYTES == 0 else payload_M.clone()


def _decode_flat(info: TensorInfo, payload_M: Tensor) -> Tensor:
    dtype = TORCH_DTYPE[info.dtype]
    if info.codec == Codec.NONE:
        return payload_M.view(dtype)
    if info.codec in HALVES:
        return payload_M.view(HALVES[info.codec]).to(dtype)
    count = prod(info.shape)
    if info.codec in SPARSE:
        return SPARSE[info.codec][1](payload_M, count, info.param, dtype)
    return BLOCKWISE[info.codec][1](payload_M, count, dtype)


Encoded = tuple[tuple[TensorInfo, ...], list[Buffer]]


def describe_values(values: Sequence[Tensor]) -> tuple[TensorInfo, ...]:
    """Return the descriptors of the values without compression. Raises KeyError for a dtype that cannot be sent."""
    return tuple(TensorInfo(Codec.NONE, DTYPE_OF[value.dtype], tuple(value.shape)) for value in values)


def encode_values(values: Sequence[Tensor], codec: Codec = Codec.NONE, topk_share: float = 1.0) -> Encoded:
    """Return descriptors and payloads of the values. Only floats of two or more dimensions are compressed: integers are token
    ids or labels, and vectors are small sums. Values beyond float16's range are not sent as FP16: the receiver would blame the
    sender for infinity. `topk_share` is the share of elements that top-k keeps."""
    encoded = [
        encode(value, codec, param=round(topk_share * value.numel()) if codec == Codec.TOPK else 0)
        if value.is_floating_point()
        and value.dim() > 1
        and not (codec == Codec.FP16 and LARGEST_IN_FP16 < largest_of(value) < math.inf)
        else encode(value, Codec.NONE)
        for value in values
    ]
    return tuple(info for info, _ in encoded), [payload for _, payload in encoded]


def largest_of(value: Tensor) -> float:
    """Return the largest magnitude of the elements: 0 if there are none, NaN if one is NaN."""
    return float(value.detach().abs().amax()) if value.numel() else 0.0


def payload_of(buffers: Sequence[Buffer]) -> bytes:
    """Return the buffers of payloads joined into one payload, as they come in a frame."""
    return b"".join(buffers)


def decode_values(infos: Sequence[TensorInfo], payload: Buffer, device: torch.device | str) -> tuple[Tensor, ...]:
    """Return the tensors: floats on `device`, integers on the host. Raises ProtocolError if the payload does not match the
    descriptors."""
    view = memoryview(payload)
    values: list[Tensor] = []
    for info in infos:
        size = payload_bytes(info)
        values.append(decode(info, view[:size], device=device if info.dtype in FLOAT_DTYPES else "cpu"))
        view = view[size:]
    if len(view):
        raise ProtocolError(f"a payload has {len(view)} bytes more than its descriptors imply")
    return tuple(values)


def as_decoded(values: Sequence[Tensor], infos: Sequence[TensorInfo]) -> list[Tensor]:
    """Return `values` as they would arrive, encoded as `infos` say; whole numbers as they are. Raises ProtocolError if their number
    or shapes differ."""
    if [tuple(value.shape) for value in values] != [info.shape for info in infos]:
        raise ProtocolError("the sent values have other shapes than the computed ones")
    pairs = zip(values, infos, strict=True)
    return [_as_decoded(value, info) if value.is_floating_point() else value for value, info in pairs]


def _as_decoded(value: Tensor, info: TensorInfo) -> Tensor:
    if info.codec == Codec.TOPK:  # its encoder takes a sample, and could keep a few more or less the second time
        return largest_only(value.reshape(-1), info.param).view(value.shape)
    return decode(*encode(value, Codec(info.codec)))


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
