"""What fits: sizes from headers equal what is loaded, and the arithmetic of limits."""

from __future__ import annotations

import pytest
import torch

from swarmnode.compute.capacity.capacity import (
    UnitSizes,
    cache_tokens_that_fit,
    describe_fit,
    unit_sizes,
    units_that_fit,
    usable_bytes,
)
from swarmnode.compute.device import probe_device, set_threads
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.serving.loading import load_span
from swarmnode.counting import format_bytes
from swarmnode.errors import LocalError

MB = 1_000_000
SIZES = UnitSizes((50 * MB, *[100 * MB] * 10, 60 * MB), (0, *[1000] * 10, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_those_of_the_loaded_span(checkpoint_path, dtype):
    checkpoint = Checkpoint(checkpoint_path)
    sizes = unit_sizes(checkpoint, dtype=dtype)
    for start, end in ((0, 1), (1, 3), (4, 6), (0, 6)):
        span = load_span(checkpoint, start, end, dtype=dtype)
        weights = sum(parameter.nbytes for parameter in span.model.parameters())
        assert sum(sizes.weight_bytes[start:end]) == weights
        assert sum(sizes.cache_bytes_per_token[start:end]) == span.cache_bytes_per_token
        assert span.dtype == dtype


def test_how_many_fit():
    assert usable_bytes(1000 * MB) == 1000 * MB - (64 << 20)
    assert units_that_fit(SIZES, 1000 * MB, 0) == 9
    assert units_that_fit(SIZES, 1000 * MB, 10_000) == 8  # 10 MB of cache per unit
    assert units_that_fit(SIZES, 1000 * MB, 0, start=6) == 6  # the last five layers and the head
    assert units_that_fit(SIZES, 10 * MB, 0) == 0
    assert cache_tokens_that_fit(SIZES, 1000 * MB, 1, 9) == (1000 * MB - (64 << 20) - 800 * MB) // 8000
    assert cache_tokens_that_fit(SIZES, 1000 * MB, 0, 1) == 0


def test_the_sentence():
    assert (
        describe_fit(SIZES, 1, 9, 8192)
        == "8 of 12 layers: 800.0 MB of weights, and 65.5 MB for texts of 8,192 tokens in all"
    )
    assert [format_bytes(n) for n in (5, 2500, 5.1e9)] == ["5 B", "2 kB", "5.1 GB"]


def test_devices(monkeypatch):
    device = probe_device("cpu")
    assert 0 < device.free_bytes <= device.total_bytes
    assert device.default_dtype == torch.float32
    assert "GiB free" in str(device)
    with pytest.raises(LocalError, match="no device 'tpu'"):
        probe_device("tpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads() == torch.get_num_threads() == 1
