"""top-k with values of two bits: which elements, how near, how few bytes, and what a hostile peer may say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmnode.codec.tensors import Codec, DType, TensorInfo, payload_bytes
from swarmnode.compress.codecs import decode, encode
from swarmnode.errors import ErrorCode, ProtocolError

F32 = int(DType.FLOAT32)


def normal(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("count", [300, 5000, 262_144])
@pytest.mark.parametrize("share", [0.01, 0.03, 0.3])
def test_it_keeps_the_elements_that_top_k_keeps(count: int, share: float) -> None:
    values = normal(count)
    keep = round(count * share)
    (info, payload), (_, exact) = encode(values, Codec.TOPK2, param=keep), encode(values, Codec.TOPK, param=keep)
    decoded = decode(info, payload)
    assert torch.equal(decoded != 0, decode(TensorInfo(Codec.TOPK, F32, (count,), info.param), exact) != 0)
    kept = decoded != 0
    assert torch.equal(decoded.sign()[kept], values.sign()[kept])
    assert float((decoded - values)[kept].norm() / values[kept].norm()) < 0.25


def test_a_hundredth_of_the_bytes() -> None:
    info, payload = encode(normal(1 << 18), Codec.TOPK2, param=round(0.02 * (1 << 18)))
    assert 4 * (1 << 18) / memoryview(payload).nbytes > 120
    assert memoryview(payload).nbytes == payload_bytes(info)


def test_a_chunk_of_which_nothing_is_kept() -> None:
    values = torch.zeros(10_000)
    values[9_000] = -3.0
    info, payload = encode(values, Codec.TOPK2, param=1)
    assert torch.equal(decode(info, payload), values)


def test_more_than_a_count_can_say() -> None:
    """All 256 of a block are large; NaN is not the one that is left out."""
    values = torch.full((600,), 4.0)
    values[17], values[300] = 3.0, torch.nan
    info, payload = encode(values, Codec.TOPK2, param=600)
    decoded = decode(info, payload)
    assert info.param == 600 - 2
    assert decoded[17] == 0
    assert not decoded[300].isfinite()


def test_encoding_again_what_was_decoded_changes_nothing() -> None:
    info, payload = encode(normal(9000), Codec.TOPK2, param=200)
    again = encode(decode(info, payload), Codec.TOPK2, param=info.param)
    assert (again[0], bytes(again[1])) == (info, bytes(payload))


BAD = {
    "falling indices": ([4, 3], [2]),
    "an index twice": ([3, 3], [2]),
    "an index past the end": ([3, 200], [2]),
    "counts that add up to less": ([3, 4], [1]),
    "counts that add up to more": ([3, 4], [3]),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_positions(name: str) -> None:
    indices, counts = BAD[name]
    payload = bytes(4) + bytes(1) + bytes(indices) + bytes(counts)
    with pytest.raises(ProtocolError) as caught:
        decode(TensorInfo(Codec.TOPK2, F32, (200,), 2), payload)
    assert caught.value.code == ErrorCode.MALFORMED


@given(st.integers(0, 600), st.integers(0, 600), st.binary(max_size=900))
def test_any_bytes_are_a_tensor_or_refused(count: int, kept: int, data: bytes) -> None:
    info = TensorInfo(Codec.TOPK2, F32, (count,), kept)
    if kept <= count:
        data = (data * 900)[: payload_bytes(info)] if data else bytes(payload_bytes(info))
    try:
        assert decode(info, data).shape == (count,)
    except ProtocolError as error:
        assert error.code == ErrorCode.MALFORMED
