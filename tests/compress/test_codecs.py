"""Round trips, error bounds and determinism of every codec."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from swarmnode.codec.tensors import SPARSE_CODECS, Codec, DType, TensorInfo, payload_bytes
from swarmnode.compress import blockwise, codecs
from swarmnode.compress.blockwise import PIECE_ELEMENTS
from swarmnode.compress.codecs import decode, encode

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LOSSY = (Codec.INT8, Codec.INT4, Codec.TOPK, Codec.TOPK2)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(original: Tensor, decoded: Tensor) -> float:
    return float((original - decoded).norm() / original.norm())


def round_trip(tensor: Tensor, codec: Codec, param: int = 0) -> Tensor:
    info, payload = encode(tensor, codec, param=param)
    assert memoryview(payload).nbytes == payload_bytes(info)
    decoded = decode(info, payload)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    return decoded


shapes = st.lists(st.sampled_from([0, 1, 2, 3, 31, 33, 63, 64, 65, 129]), max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(shape=shapes, dtype=st.sampled_from(FLOATS), codec=st.sampled_from(Codec), seed=st.integers(0, 9))
def test_round_trip_of_any_shape(shape: tuple[int, ...], dtype: torch.dtype, codec: Codec, seed: int) -> None:
    tensor = normal(*shape, seed=seed).to(dtype)
    param = tensor.numel() if codec in SPARSE_CODECS else 0  # all elements kept: as good as its 16-bit values
    decoded = round_trip(tensor, codec, param).float()
    bound = {
        Codec.NONE: 0.0,
        Codec.FP16: 1e-3,
        Codec.INT8: 0.01,
        Codec.INT4: 0.12,
        Codec.INT2: 0.26,
        Codec.TOPK2: 0.25,
    }.get(codec, 0.005)
    peak = float(tensor.abs().max()) if tensor.numel() else 0.0
    assert float((decoded - tensor.float()).abs().sum()) <= bound * peak * tensor.numel()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integers_travel_as_they_are(dtype: torch.dtype) -> None:
    ids_BT = torch.randint(0, 200, (2, 7), generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(round_trip(ids_BT, Codec.NONE), ids_BT)
    with pytest.raises(ValueError, match="INT8 does not carry"):
        encode(ids_BT, Codec.INT8)


def test_a_dtype_that_has_no_code_is_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float64"):
        encode(torch.zeros(3, dtype=torch.float64), Codec.NONE)


@pytest.mark.parametrize("codec", list(Codec))
def test_strides_and_gradients_of_the_input_do_not_matter(codec: Codec) -> None:
    wide = normal(40, 66)
    cut = wide[:, 1:65].t()
    _, expected = encode(cut.contiguous(), codec, param=100)
    _, payload = encode(cut.clone(memory_format=torch.preserve_format).requires_grad_(), codec, param=100)
    assert bytes(payload) == bytes(expected)


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_same_tensor_gives_the_same_bytes(codec: Codec, dtype: torch.dtype) -> None:
    tensor = normal(300, 401).to(dtype)
    first, again = encode(tensor, codec, param=5000), encode(tensor.clone(), codec, param=5000)
    assert first[0] == again[0]
    assert bytes(first[1]) == bytes(again[1])


@pytest.mark.parametrize(
    ("codec", "bound"), [(Codec.BF16, 0.0018), (Codec.FP16, 0.00025), (Codec.INT8, 0.008), (Codec.INT4, 0.105)]
)
def test_error_on_normal_data(codec: Codec, bound: float) -> None:
    original = normal(512, 1024)
    assert relative_error(original, round_trip(original, codec)) <= bound


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_block_wise_codecs_do_not_depend_on_the_magnitude(scale: float) -> None:
    original = normal(64, 64) * scale
    unit = original.double().norm()
    for codec, bound in ((Codec.INT8, 0.008), (Codec.INT4, 0.105)):
        assert float((round_trip(original, codec).double() - original.double()).norm() / unit) <= bound


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.INT4])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40, -3.0, 3e38])
def test_groups_of_one_value(codec: Codec, value: float) -> None:
    original = torch.full((130,), value)
    assert torch.allclose(round_trip(original, codec), original, rtol=0.005, atol=1e-38)


def test_hadamard_tiles_hold_outliers_better(monkeypatch: pytest.MonkeyPatch) -> None:
    original = normal(1 << 18)
    original[::300] *= 30
    rotated = relative_error(original, round_trip(original, Codec.INT4))
    monkeypatch.setattr(blockwise, "OUTLIER_RATIO", float("inf"))
    plain = relative_error(original, round_trip(original, Codec.INT4))
    assert rotated < 0.7 * plain


def test_hadamard_is_used_only_where_it_helps() -> None:
    tile = torch.zeros(32)
    tile[3] = 1.0
    _, payload = encode(torch.cat((tile, normal(32))), Codec.INT4)
    scales = torch.frombuffer(bytearray(payload[:4]), dtype=torch.bfloat16)
    assert torch.signbit(scales).tolist() == [True, False]
    rotated_up = torch.full((32,), 0.15)  # already flat after the transform: one large value would come out
    rotated_up[0] = 1.0
    _, payload = encode(rotated_up, Codec.INT4)
    assert not torch.signbit(torch.frombuffer(bytearray(payload[:2]), dtype=torch.bfloat16)).item()


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("count", [100, PIECE_ELEMENTS + 77])
def test_what_is_not_finite_stays_not_finite(codec: Codec, dtype: torch.dtype, bad: float, count: int) -> None:
    tensor = normal(count).to(dtype)
    tensor[70] = bad
    decoded = round_trip(tensor, codec, param=5)
    assert not torch.isfinite(decoded[70])
    if codec != Codec.TOPK2:  # whose groups are of 4,096
        assert torch.isfinite(decoded[:32]).all()


def test_values_past_the_range_of_float16_are_noticed() -> None:
    assert torch.isinf(round_trip(torch.tensor([1e6]), Codec.FP16)).all()


@pytest.mark.parametrize("count", [1000, 300_000])
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_topk_keeps_the_largest(count: int, fraction: float, dtype: torch.dtype) -> None:
    tensor = normal(count).to(dtype)
    keep = max(1, int(count * fraction))
    info, payload = encode(tensor, Codec.TOPK, param=keep)
    decoded = decode(info, payload)
    kept = decoded != 0
    assert abs(info.param - keep) <= 0.25 * keep
    assert int(kept.sum()) == info.param
    assert tensor[kept].abs().min() >= tensor[~kept].abs().max()
    assert torch.allclose(decoded[kept].float(), tensor[kept].float(), rtol=0.004)


@pytest.mark.parametrize("tensor", [torch.ones(200_000), torch.zeros(200_000), torch.arange(200_000) % 7 // 6 * 1.0])
def test_topk_of_many_equal_values_keeps_exactly_as_many_as_asked(tensor: Tensor) -> None:
    assert encode(tensor, Codec.TOPK, param=1000)[0].param == 1000


def test_topk_takes_the_smaller_of_bitmask_and_indices() -> None:
    few, many = TensorInfo(5, 0, (100_000,), 100), TensorInfo(5, 0, (100_000,), 20_000)
    assert payload_bytes(few) == 100 * 2 + 100 * 2 + 2 * 4
    assert payload_bytes(many) == 20_000 * 2 + 12_500


def test_large_dense_payloads_are_views_and_small_ones_are_copies() -> None:
    large, small = normal(codecs.COPY_BYTES), normal(16)
    info, view = encode(large, Codec.NONE)
    _, copy = encode(small, Codec.NONE)
    assert isinstance(view, memoryview) and isinstance(copy, bytes)
    buffer = bytearray(view)
    assert decode(info, buffer).data_ptr() == torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("codec", list(Codec))
def test_payloads_may_be_read_only_or_unaligned(codec: Codec) -> None:
    original = normal(200)
    info, payload = encode(original, codec, param=20)
    expected = decode(info, bytes(payload))
    unaligned = memoryview(bytearray(b"x" + bytes(payload)))[1:]
    assert torch.equal(decode(info, unaligned), expected)
    assert torch.equal(decode(info, unaligned.toreadonly()), expected)


def test_every_dtype_of_the_table_has_a_torch_dtype() -> None:
    assert {int(code) for code in DType} == set(codecs.TORCH_DTYPE)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 3e38, float("inf"), float("nan")])
def test_small_tensors_are_the_same_bytes_by_either_way(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(3, 5, 64, generator=generator) * scale
    fast_info, fast = encode(x, Codec.INT8)
    read = decode(fast_info, fast)
    monkeypatch.setattr("swarmnode.compress.blockwise.MOST_ELEMENTS", 0)
    slow_info, slow = encode(x, Codec.INT8)
    assert (fast_info, bytes(fast)) == (slow_info, bytes(slow))
    assert torch.equal(read.nan_to_num(), decode(slow_info, slow).nan_to_num())
