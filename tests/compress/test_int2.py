"""Two bits for each element: levels, sizes, and error feedback that loses nothing in the long run."""

from __future__ import annotations

import pytest
import torch

from swarmnode.codec.tensors import Codec, payload_bytes
from swarmnode.compress.codecs import decode, encode


def around(x: torch.Tensor) -> torch.Tensor:
    """As it is read."""
    return decode(*encode(x, Codec.INT2))


@pytest.mark.parametrize("count", [1, 3, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_element_becomes_the_nearest_of_four_levels(count: int, dtype: torch.dtype) -> None:
    x_N = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    info, payload = encode(x_N, Codec.INT2)
    assert len(payload) == payload_bytes(info) == 18 * -(-count // 64)
    read_N = decode(info, payload)
    assert read_N.dtype == dtype
    for part_W, read_W in zip(x_N.float().split(64), read_N.float().split(64), strict=True):
        scale = (part_W.abs().max() / 4).bfloat16().float()
        levels_4 = scale * torch.tensor([-3.0, -1.0, 1.0, 3.0])
        nearest_W = (part_W[:, None] - levels_4).abs().amin(1)
        torch.testing.assert_close((part_W - read_W).abs(), nearest_W, rtol=0.02, atol=0.02 * float(scale))


def test_the_bytes_are_those_of_the_protocol() -> None:
    info, payload = encode(torch.tensor([8.0, -8.0] * 32), Codec.INT2)
    assert bytes(payload).hex() == "0040" + "33" * 16
    assert decode(info, payload).tolist() == [6.0, -6.0] * 32


def test_what_is_not_finite_stays_so() -> None:
    assert not around(torch.tensor([1.0, float("nan")])).isfinite().all()
    assert not around(torch.tensor([1.0, float("inf")])).isfinite().all()
    assert around(torch.zeros(64)).abs().max() < 1e-30


def test_error_feedback_sends_all_in_the_long_run() -> None:
    x_N = torch.randn(640, generator=torch.Generator().manual_seed(0))
    left_N, sent_N = torch.zeros(640), torch.zeros(640)
    for _ in range(60):
        said_N = around(x_N + left_N)
        left_N += x_N - said_N
        sent_N += said_N
    assert float((sent_N / 60 - x_N).norm() / x_N.norm()) < 0.05
