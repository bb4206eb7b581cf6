"""Quantised tensors of a checkpoint of safetensors: which of them make which parameter, known from names and headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from swarmnode.compute.model.dequantize.methods import method_of
from swarmnode.compute.model.dequantize.packed_matrix import Method, PackedMatrix
from swarmnode.compute.model.packing.tensor_entry import TensorEntry
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import Progress

PACKED_DTYPES = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"})
PLAIN_MATRICES = frozenset({"BF16", "F16"})


class QuantisedTensors:
    """Quantised tensors among `entries`, by the method of a quantization_config (`settings`).

    `packed` has the packed tensors' names, `beside` those of their scales and other companions. Raises CheckpointError if the
    method is not supported, no tensor is quantised, or a packed tensor is missing.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> None:
        self.settings = settings
        self.method: Method = method_of(settings)
        self._path, self._entries = path, entries
        packed = {name for name, entry in entries.items() if self.method.packs(name, entry)}
        self.beside = {
            self.method.stem(name) + suffix for name in packed for suffix in self.method.beside
        } & entries.keys()
        self.packed = packed - self.beside  # quantised scales look like packed weights, too
        self._check()

    def __repr__(self) -> str:
        return f"QuantisedTensors({type(self.method).__name__}, {len(self.packed)} matrices of {self._path})"

    def _check(self) -> None:
        if not self.packed:
            raise CheckpointError(
                f"{self._path}: its config says quantised, but no tensor is; fetch the checkpoint again"
            )
        suffixes = tuple(suffix for suffix in self.method.beside if suffix.startswith("."))
        for name in self.plain_names:
            if suffixes and name.endswith(suffixes):
                raise CheckpointError(
                    f"{name} is there, but the packed weight that it belongs to is missing; fetch the checkpoint again"
                )
            dtype = self._entries[name].dtype
            if name.endswith("weight") and dtype in PACKED_DTYPES:
                raise CheckpointError(
                    f"{name} is {dtype}, which is not how its "
                    "quantization_config packs weights; fetch the checkpoint again"
                )

    @cached_property
    def plain_names(self) -> list[str]:
        """Names of the tensors that are not quantised."""
        return [name for name in self._entries if not self.is_quantised(name)]

    @cached_property
    def marked(self) -> dict[str, TensorEntry]:
        """All tensors, those that stay packed with the numbers that they stand for and the bytes that they take in memory. Plain
        matrices of two bytes for each number, as embeddings are, keep them."""
        entries = dict(self._entries)
        for name in self.beside:
            memory = 0 if self.method.value_bytes else entries[name].nbytes
            entries[name] = replace(entries[name], values=0, memory=memory)
        for name in self.packed:
            entry = self._entries[name]
            values = int(entry.elements * self.method.per_element)
            memory = int(values * self.method.value_bytes) or entry.nbytes
            entries[name] = replace(entry, values=values, memory=memory)
        for name in self.plain_names:
            entry = self._entries[name]
            if entry.dtype in PLAIN_MATRICES and len(entry.shape) == 2:
                entries[name] = replace(entry, values=entry.elements, memory=entry.nbytes)
        return entries

    def is_quantised(self, name: str) -> bool:
        """Return whether a tensor is a packed one, or a companion of one."""
        return name in self.packed or name in self.beside

    def parameter(self, name: str) -> str:
        """Return the name that the plain weight of a packed tensor has."""
        return self.method.stem(name) + self.method.plain_end

    def companions(self, name: str) -> dict[str, str]:
        """Return the names of the tensors beside a packed one, by their suffixes."""
        stem = self.method.stem(name)
        return {suffix: stem + suffix for suffix in self.method.beside if stem + suffix in self.beside}

    def matrix(self, name: str, tensors: Mapping[str, Any]) -> PackedMatrix:
        """Return the matrix of a packed tensor. `tensors` are tensors or slices of safetensors. Nothing is copied."""
        beside = {suffix: tensors[full][...] for suffix, full in self.companions(name).items()}
        return PackedMatrix(name, tensors[name][...], beside, self.settings)

    def check(self, tensors: Mapping[str, Any], progress: Progress | None = None) -> None:
        """Raise CheckpointError if quantised tensors do not fit together, or hold values that are no finite numbers."""
        total = sum(self._entries[name].nbytes for name in self.packed)
        done = 0
        for name in sorted(self.packed):
            matrix = self.matrix(name, tensors)
            plain_shape(self.method, matrix)
            self.method.check_finite(matrix)
            done += self._entries[name].nbytes
            if progress is not None:
                progress(done, total)

    def slices(self, tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, QuantisedSlice]:
        """Return the parameters that these packed tensors make, to be dequantised when they are read."""
        return {self.parameter(name): QuantisedSlice(self, name, tensors) for name in names}


class QuantisedSlice:
    """Parameter that is dequantised when it is read, with the interface of a safetensors slice."""

    def __init__(self, quantised: QuantisedTensors, name: str, tensors: Mapping[str, Any]) -> None:
        self._quantised, self._name, self._tensors = quantised, name, tensors

    def __getitem__(self, index: Any) -> Tensor:
        whole: Tensor = dequantised(self._quantised.method, self._quantised.matrix(self._name, self._tensors))[index]
        return whole

    def get_shape(self) -> list[int]:
        """Return the shape of the parameter."""
        return list(plain_shape(self._quantised.method, self._quantised.matrix(self._name, self._tensors)))

    def get_dtype(self) -> str:
        """Return the dtype of the values."""
        return "F32"


def dequantised(method: Method, matrix: PackedMatrix) -> Tensor:
    """Return the plain weight as float32. Raises CheckpointError if the matrix is damaged, or a scale is no finite number."""
    method.check_finite(matrix)
    try:
        return method.dequantize(matrix)
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise CheckpointError(f"{matrix.name} cannot be dequantised: {error}; use the model's plain weights") from error


def plain_shape(method: Method, matrix: PackedMatrix) -> tuple[int, ...]:
    """Return the shape of the plain weight. Raises CheckpointError if the matrix is damaged."""
    try:
        shape = method.shape(matrix)
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        raise CheckpointError(f"{matrix.name} cannot be read: {error}; fetch the checkpoint again") from error
    return (*shape[:-2], shape[-1], shape[-2]) if method.transposes else shape
