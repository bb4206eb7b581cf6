"""Values that cross a boundary: there and back, and what a peer may have made of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.codec.tensors import Codec, TensorInfo
from swarmnode.compress.codecs import decode_values, encode_values
from swarmnode.errors import ProtocolError


def values() -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    hidden_BTH = torch.randn(2, 3, 64, generator=generator)
    return hidden_BTH, torch.arange(6).view(2, 3), torch.tensor(2.5), torch.empty(0, 4)


def payload_of(payload: list[bytes | bytearray | memoryview]) -> bytearray:
    return bytearray(b"".join(payload))


def test_values_come_back() -> None:
    infos, payload = encode_values(values())
    decoded = decode_values(infos, payload_of(payload), "cpu")
    assert all(torch.equal(there, here) for there, here in zip(decoded, values(), strict=True))
    assert decode_values((), b"", "cpu") == ()


@pytest.mark.parametrize("codec", [Codec.BF16, Codec.FP16, Codec.INT8, Codec.INT4])
def test_floats_are_compressed_but_vectors_and_integers_are_exact(codec: Codec) -> None:
    infos, payload = encode_values(values(), codec)
    assert [info.codec for info in infos] == [codec, Codec.NONE, Codec.NONE, codec]
    hidden_BTH, ids_BT, *_ = decode_values(infos, payload_of(payload), "cpu")
    assert torch.equal(ids_BT, values()[1])
    assert float((hidden_BTH - values()[0]).abs().max()) < 0.5


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: raw[:3]])
def test_a_payload_of_another_length(change: object) -> None:
    infos, payload = encode_values(values())
    with pytest.raises(ProtocolError):
        decode_values(infos, change(payload_of(payload)), "cpu")  # type: ignore[operator]


infos = st.builds(
    TensorInfo,
    st.integers(-1, 7),
    st.integers(-1, 7),
    st.lists(st.integers(-1, 1 << 33) | st.integers(0, 3), max_size=9).map(tuple),
    st.integers(-1, 9),
)


@settings(max_examples=300, deadline=None)
@given(described=st.lists(infos, max_size=3), payload=st.binary(max_size=64))
def test_nothing_but_tensors_and_protocol_errors(described: list[TensorInfo], payload: bytes) -> None:
    try:
        decoded = decode_values(described, payload, "cpu")
    except ProtocolError:
        return
    assert [tuple(value.shape) for value in decoded] == [info.shape for info in described]


def test_an_empty_tensor_of_impossible_sizes() -> None:
    with pytest.raises(ProtocolError, match="elements"):
        decode_values((TensorInfo(Codec.NONE, 0, (0, 2996, 55477850, 55491734)),), b"", "cpu")


@pytest.mark.parametrize(("largest", "codec"), [(6e4, Codec.FP16), (7e4, Codec.NONE), (math.inf, Codec.FP16)])
def test_values_past_the_range_of_float16_are_not_sent_as_it(largest: float, codec: Codec) -> None:
    """The receiver would put infinity down to an honest sender."""
    infos, _ = encode_values([torch.tensor([[1.0, -largest]])], Codec.FP16)
    assert infos[0].codec == codec
