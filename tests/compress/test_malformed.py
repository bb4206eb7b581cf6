"""Descriptors and payloads of a hostile peer: refused with the right code, before anything is allocated."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmnode.codec.tensors import MAX_ELEMENTS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.compress.codecs import decode, encode
from swarmnode.errors import ErrorCode, ProtocolError

F32 = int(DType.FLOAT32)


def refused(info: TensorInfo, payload: bytes, max_elements: int = MAX_ELEMENTS) -> ErrorCode:
    with pytest.raises(ProtocolError) as caught:
        decode(info, payload, max_elements=max_elements)
    return caught.value.code


@pytest.mark.parametrize(
    "info",
    [
        TensorInfo(99, F32, (1,)),
        TensorInfo(-1, F32, (1,)),
        TensorInfo(Codec.NONE, 99, (1,)),
        TensorInfo(Codec.NONE, -1, (1,)),
        TensorInfo(Codec.NONE, F32, (-1,)),
        TensorInfo(Codec.NONE, F32, (-1, -1)),
        TensorInfo(Codec.NONE, F32, (1,) * 9),
        TensorInfo(Codec.NONE, F32, (1,), 1),
        TensorInfo(Codec.INT8, F32, (1,), 1),
        TensorInfo(Codec.INT8, DType.INT64, (1,)),
        TensorInfo(Codec.TOPK, DType.INT32, (1,), 1),
        TensorInfo(Codec.TOPK, F32, (4,), 5),
        TensorInfo(Codec.TOPK, F32, (4,), -1),
    ],
    ids=repr,
)
def test_bad_descriptors(info: TensorInfo) -> None:
    assert refused(info, b"\0" * 4) == ErrorCode.MALFORMED


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("wrong", [-1, 1, 100])
def test_payloads_of_another_length(codec: Codec, wrong: int) -> None:
    info, payload = encode(torch.arange(70.0), codec, param=7)
    cut = bytes(payload)[:wrong] if wrong < 0 else bytes(payload) + b"\0" * wrong
    assert refused(info, cut) == ErrorCode.MALFORMED


@pytest.mark.parametrize("shape", [(1 << 62,), (1 << 31, 2), (1 << 40, 1 << 40, 1 << 40), (101,)])
def test_tensors_over_the_bound_are_refused_without_allocating(shape: tuple[int, ...]) -> None:
    tracemalloc.start()
    codes = {refused(TensorInfo(codec, F32, shape), b"", max_elements=100) for codec in Codec}
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert codes == {ErrorCode.TOO_LARGE}
    assert peak_bytes < 100_000


def mask_payload(mask: bytes, kept: int) -> bytes:
    return b"\0\0" * kept + mask


@pytest.mark.parametrize(
    ("count", "kept", "mask"),
    [
        (16, 3, b"\x03\x00"),  # fewer bits than announced
        (16, 3, b"\x0f\x00"),  # more
        (12, 3, b"\x03\x10"),  # a bit past the end
    ],
)
def test_bad_bitmasks(count: int, kept: int, mask: bytes) -> None:
    assert refused(TensorInfo(Codec.TOPK, F32, (count,), kept), mask_payload(mask, kept)) == ErrorCode.MALFORMED


def index_payload(indices: list[int], counts: list[int]) -> bytes:
    return b"\0\0" * len(indices) + struct.pack(f"<{len(indices)}H{len(counts)}I", *indices, *counts)


@pytest.mark.parametrize(
    ("indices", "counts"),
    [
        ([5, 5], [2, 0]),  # twice the same
        ([6, 5], [2, 0]),  # falling
        ([5, 40_000], [1, 1]),  # past the end of the second block
        ([5, 6], [1, 0]),  # the counts say one
        ([5, 6], [3, 0]),  # the counts say three
        ([5, 6], [0xFFFFFFFF, 3]),  # they add up only as 32-bit numbers
    ],
)
def test_bad_short_indices(indices: list[int], counts: list[int]) -> None:
    info = TensorInfo(Codec.TOPK, F32, (100_000,), len(indices))
    assert refused(info, index_payload(indices, counts)) == ErrorCode.MALFORMED


def test_good_short_indices() -> None:
    info = TensorInfo(Codec.TOPK, F32, (100_000,), 3)
    assert payload_bytes(info) == len(index_payload([5, 6, 7], [2, 1]))
    payload = bytearray(index_payload([5, 65_535, 34_463], [2, 1]))
    payload[:6] = struct.pack("<3H", 0x3F80, 0x4000, 0x4040)  # bfloat16 1, 2, 3
    decoded = decode(info, payload)
    assert {int(place): float(decoded[place]) for place in decoded.nonzero()} == {5: 1.0, 65_535: 2.0, 99_999: 3.0}


infos = st.builds(
    TensorInfo,
    st.integers(-1, 7),
    st.integers(-1, 7),
    st.lists(st.integers(-1, 40), max_size=4).map(tuple),
    st.integers(-1, 50),
)


@settings(max_examples=400, deadline=None)
@given(info=infos, data=st.data())
def test_nothing_but_protocol_errors(info: TensorInfo, data: st.DataObject) -> None:
    try:
        length = payload_bytes(info)
    except ProtocolError:
        length = 8
    payload = data.draw(st.binary(min_size=min(length, 4000), max_size=min(length, 4000)))
    try:
        decoded = decode(info, payload, max_elements=4000)
    except ProtocolError as error:
        assert error.code in (ErrorCode.MALFORMED, ErrorCode.TOO_LARGE)
    else:
        assert tuple(decoded.shape) == info.shape
        assert decoded.numel() <= 4000
