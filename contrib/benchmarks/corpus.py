"""Text that every machine has, for benchmarks that train: the standard library's sources, as bytes."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

DATA_BYTES = 4_000_000


def read_corpus() -> Tensor:
    """Return bytes of the standard library's sources, as ids."""
    sources = sorted(Path(typing.__file__).parent.glob("*.py"))
    data = b"\n".join(source.read_bytes() for source in sources)[:DATA_BYTES]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def batches(corpus_N: Tensor, batch: int, sequence: int, seed: int) -> Iterator[Tensor]:
    """Yield batches ids_BT of random windows, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts_B = torch.randint(len(corpus_N) - sequence, (batch,), generator=generator)
        yield corpus_N[starts_B[:, None] + torch.arange(sequence)]
