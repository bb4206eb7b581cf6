"""Bytes that a pass keeps for its way back, measured on two short passes, so that they are known before a long one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarmnode.compute.executor import ByPiece

SHORT, LONG = 8, 24  # tokens of the measured passes


class KeptStorage:
    """Storages that autograd keeps while `watching` is entered, each once, without those of `known` tensors (weights)."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._kept: dict[int, tuple[int, Tensor]] = {}

    def __repr__(self) -> str:
        return f"<KeptStorage of {self.size_bytes} bytes>"

    @property
    def size_bytes(self) -> int:
        """Bytes of all kept storages."""
        return sum(size for size, _ in self._kept.values())

    def note(self, tensor: Tensor) -> Tensor:
        """Count the storage of `tensor`, and return it. It stays alive, so that no other takes its address."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    def watching(self) -> AbstractContextManager[None]:
        """Return a context that counts each tensor that autograd saves."""
        return torch.autograd.graph.saved_tensors_hooks(self.note, lambda tensor: tensor)


@dataclass(frozen=True)
class ActivationSize:
    """Bytes that a row of T positions keeps: `linear` * T + `square` * T * T."""

    linear: float
    square: float

    @classmethod
    def measured(cls, kept_bytes: Callable[[int], ByPiece[int]], prompt_tokens: int = 0) -> ByPiece[ActivationSize]:
        """Return the size that fits `kept_bytes`, which runs a row of some positions and returns the bytes that it keeps.

        A row begins with the `prompt_tokens` of a soft prompt.
        """
        short, long = SHORT + prompt_tokens, LONG + prompt_tokens
        short_bytes = (yield from kept_bytes(short)) / short
        long_bytes = (yield from kept_bytes(long)) / long
        square = max(0.0, (long_bytes - short_bytes) / (long - short))
        return cls(max(short_bytes, long_bytes) - square * short, square)

    def of(self, rows: int, positions: int) -> int:
        """Return the bytes of a microbatch."""
        return round(rows * positions * (self.linear + self.square * positions))
