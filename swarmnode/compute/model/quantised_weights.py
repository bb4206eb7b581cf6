"""Quantised parameters of a span that stay packed: their places in the model, whose classes rename tensors and join experts.

Quantised tensors of a checkpoint of safetensors: which of them make which parameter, known from names and headers alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.model.family import Family
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS, build_on_meta
from swarmnode.compute.packing.ggml import FORMATS
from swarmnode.compute.packing.ggml_matrix import GgmlMatrix
from swarmnode.compute.packing.methods import method_of
from swarmnode.compute.packing.packed_matrix import Method, PackedMatrix
from swarmnode.compute.packing.packed_weight import PackedStack, PackedWeight, TransposedWeight
from swarmnode.compute.packing.quantisation_methods import Mxfp4
from swarmnode.compute.packing.quantised_matrix import packed_experts, packed_matrix
from swarmnode.compute.packing.tensor_entry import LazyTensor, TensorEntry
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
        self._entries = entries
        packed = {name for name, entry in entries.items() if self.method.packs(name, entry)}
        self.beside = {
            self.method.stem(name) + suffix for name in packed for suffix in self.method.beside
        } & entries.keys()
        self.packed = packed - self.beside  # quantised scales look like packed weights, too
        if not self.packed:
            raise CheckpointError(f"{path}: its config says quantised, but no tensor is; fetch the checkpoint again")
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

    def slices(self, tensors: Mapping[str, Any], names: Iterable[str]) -> dict[str, LazyTensor]:
        """Return the parameters that these packed tensors make, to be dequantised when they are read."""

        def lazy(name: str) -> LazyTensor:
            return LazyTensor(
                "F32",
                lambda: plain_shape(self.method, self.matrix(name, tensors)),
                lambda: dequantised(self.method, self.matrix(name, tensors)),
            )

        return {self.parameter(name): lazy(name) for name in names}


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


Held = dict[str, PackedWeight | PackedStack]


@dataclass(frozen=True)
class _Place:
    """Place of packed tensors in a model's parameter: for each of its matrices the names of the parts, from above. A parameter
    of several matrices is `stacked`."""

    parts: Sequence[Sequence[str]]
    stacked: bool

    @property
    def names(self) -> set[str]:
        return {name for matrix in self.parts for name in matrix}


@lean()
def read_quantised(
    quantised: QuantisedTensors, slices: Mapping[str, Any], family: Family, dtype: torch.dtype, *, exact: bool
) -> tuple[dict[str, Any], Held]:
    """Return the slices that a model is filled from, and the weights that stay packed by the names of its parameters.

    Quantised tensors that the model does not multiply as matrices, such as an embedding, are among the slices as the parameters
    that they make. Raises CheckpointError if tensors do not fit together.
    """
    packed = {quantised.parameter(name): name for name in slices if name in quantised.packed}
    plain = plain_slices(quantised, slices)
    looked_up = f"{family.input_embedding}.weight"
    model = build_on_meta(family.model_class, family.config)
    matrices = {f"{name}.weight" for name, each in model.named_modules() if isinstance(each, nn.Linear | nn.Embedding)}
    held: Held = {}
    for target, place in _places(model, [*plain, *packed]).items():
        weight: PackedWeight | PackedStack | None = None
        if target != looked_up and place.names <= packed.keys():
            weight = _read(quantised, slices, place, packed, dtype, exact=exact)
        elif target in matrices and len(place.names) == 1 and place.names <= plain.keys():
            # In the bytes of its file: in float32, as products take activations on CPUs, an embedding would take twice the memory.
            stored = plain[place.parts[0][0]]
            form, shape = FORMATS.get(stored.get_dtype()), stored.get_shape()
            if form is not None and form.name in PLAIN_MATRICES and len(shape) == 2:
                form.check_shape(shape)
                rows_OB, is_looked_up = stored[...].view(torch.uint8), target == looked_up
                matrix = GgmlMatrix(rows_OB, form, shape[1], exact=exact, looked_up=is_looked_up)
                weight = PackedWeight([matrix], dtype)
        if weight is not None:
            held[target] = weight
            for name in place.names:
                packed.pop(name, None)
                plain.pop(name, None)
    return {**plain, **quantised.slices(slices, packed.values())}, held


def plain_slices(quantised: QuantisedTensors, slices: Mapping[str, Any], names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the slices that are not quantised, and the parameters that the packed tensors `names` make, to be dequantised."""
    others = {name: each for name, each in slices.items() if not quantised.is_quantised(name)}
    return {**others, **quantised.slices(slices, names)}


def _read(
    quantised: QuantisedTensors,
    slices: Mapping[str, Any],
    place: _Place,
    packed: Mapping[str, str],
    dtype: torch.dtype,
    *,
    exact: bool,
) -> PackedWeight | PackedStack | None:
    """Return the weight at a place; None if it cannot stay packed. `packed` has the packed tensors by their parameters."""
    method = quantised.method
    parts = [[quantised.matrix(packed[name], slices) for name in matrix] for matrix in place.parts]
    for part in (part for matrix in parts for part in matrix):
        method.check_finite(part)  # again, since a hostile founder leaves it out
    try:
        if isinstance(method, Mxfp4):
            experts = packed_experts(method, parts[0][0], exact=exact)
            return PackedStack([TransposedWeight([matrix], dtype) for matrix in experts])
        if any(len(method.shape(part)) != 2 for matrix in parts for part in matrix):
            return None
        weights = [
            PackedWeight([packed_matrix(method, part, exact=exact) for part in matrix], dtype) for matrix in parts
        ]
    except (ValueError, TypeError, RuntimeError, LookupError) as error:
        name = packed[place.parts[0][0]]
        raise CheckpointError(f"{name} cannot be read: {error}; use the model's plain weights") from error
    return PackedStack(weights) if place.stacked else weights[0]


def _places(model: Any, names: Iterable[str]) -> dict[str, _Place]:
    """Return where tensors of a checkpoint belong in the model, by its parameters, from transformers' table of renamed tensors
    and joined experts. Parameters that are made in another way are left out."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    try:
        mapping: list[Any] = get_model_conversion_mapping(model)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        found: dict[str, dict[str | None, list[str]]] = {}
        for name in sorted(names, key=dot_natural_key):
            target, source = rename_source_key(name, renamings, converters, model.base_model_prefix, shapes)
            if target not in shapes and name in shapes:
                target, source = name, None
            found.setdefault(target, {}).setdefault(source, []).append(name)
    except FOREIGN_ERRORS:
        return {}
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    places = {}
    for target, sources in found.items():
        pattern = next(iter(sources))
        if sources.keys() == {None} and target in shapes:
            places[target] = _Place([sources[None]], stacked=False)
        elif target in shapes and pattern is not None and None not in sources:
            converter = by_pattern[pattern]
            order = [sources.get(pattern, []) for pattern in converter.source_patterns]
            # Matrices of experts are stacked, and the parts of each joined one above the other.
            operations: list[Any] = converter.operations or [None]
            stacking, *joining = operations
            stacks = isinstance(stacking, MergeModulelist) and stacking.dim == 0
            joins = len(joining) == 1 and isinstance(joining[0], Concatenate) and joining[0].dim == 1
            is_known = stacks and (joins if len(order) > 1 else not joining)
            if is_known and {len(each) for each in order} == {shapes[target][0]}:
                places[target] = _Place(list(zip(*order, strict=True)), stacked=True)
    return places
