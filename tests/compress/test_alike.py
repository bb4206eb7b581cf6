"""Tensors that are encoded and decoded together: to the bit what each is alone."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from torch import Tensor

from swarmnode.codec.tensors import Codec
from swarmnode.compress.codecs import decode, decode_alike, encode, encode_alike, goes_together, info_of

SPARE_BYTES = 6  # behind each payload, as in a transfer


def samples(width: int, dtype: torch.dtype) -> list[Tensor]:
    """Large and small numbers, zeros, NaN and infinity."""
    generator = torch.Generator().manual_seed(width)
    tensors = [10.0**size * torch.randn(1, 2, width, generator=generator) for size in range(-3, 4)]
    tensors[0][0, 1, 5], tensors[1][0, 0, -1] = nan, inf
    tensors[2].zero_()
    return [tensor.to(dtype) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [Codec.NONE, Codec.BF16, Codec.FP16, Codec.INT8])
@pytest.mark.parametrize("width", [64, 36, 7], ids=["whole groups", "a group cut short", "an odd number"])
def test_each_is_what_it_is_alone(width: int, codec: Codec, dtype: torch.dtype) -> None:
    tensors = samples(width, dtype)
    payload_SM = encode_alike(tensors, codec)
    behind_SM = torch.full((len(tensors), SPARE_BYTES), 255, dtype=torch.uint8)
    wide_SM = torch.cat((payload_SM, behind_SM[:, : SPARE_BYTES - payload_SM.shape[1] % 2]), dim=1)
    info = info_of(tensors[0], codec)
    assert info is not None and goes_together(info)
    decoded = decode_alike(info, wide_SM[:, : payload_SM.shape[1]])
    for tensor, payload_M, x in zip(tensors, payload_SM, decoded, strict=True):
        alone_info, alone = encode(tensor, codec)
        has_nan = bool(tensor.isnan().any())  # whose bits depend on the CPU's instructions
        assert alone_info == info and (has_nan or bytes(alone) == payload_M.numpy().tobytes())
        torch.testing.assert_close(x, decode(alone_info, alone), rtol=0, atol=0, equal_nan=True)


def test_other_codecs_and_numbers_go_alone() -> None:
    assert info_of(torch.zeros(3, dtype=torch.complex64), Codec.NONE) is None
    for tensor, codec in ((torch.zeros(3, dtype=torch.int64), Codec.NONE), (torch.zeros(64), Codec.INT4)):
        info = info_of(tensor, codec)
        assert info is not None and not goes_together(info)
    empty = info_of(torch.zeros(0), Codec.NONE)
    assert empty is not None and not goes_together(empty)
