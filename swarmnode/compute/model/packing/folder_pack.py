"""A checkpoint of safetensors written anew with its matrices in GGUF's formats: a folder that a swarm is founded on as it is.

The folder has transformers' config and tokenizer, `packed.json`, the packed matrices in a GGUF file under the names of the model's
parameters, and all other tensors in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.model.assemble import assemble
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.dequantize.checkpoint import write_plain
from swarmnode.compute.model.packing.ggml import FORMATS
from swarmnode.compute.model.packing.gguf_writer import GgufWriter, NewTensor, key_of_number, key_of_text
from swarmnode.compute.model.packing.quantise import check_format, quantised_tiles
from swarmnode.compute.model.packing.recipes import END, TABLE, FormatChoice, FormatMix, Matrix, choose
from swarmnode.compute.model.tensor_check import check_tensors
from swarmnode.compute.model.trace import build_on_meta
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import INDEX_NAME, PACKED_NAME, SMALL_NAMES, Progress

WEIGHTS_NAME = "weights.gguf"
ARCHITECTURE = "swarmnode"  # llama.cpp refuses the file: its tensors have other names there
ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})  # small, and decide much


class FolderPack:
    """Checkpoint whose matrices are to be written in the formats of a recipe.

    Raises CheckpointError if its tensors do not make its model, if it is packed already, or if few of its weights can be packed;
    LocalError if a format needs a missing package.
    """

    def __init__(self, checkpoint: Checkpoint, recipe: FormatMix) -> None:
        self._checkpoint, self._recipe, self._family = checkpoint, recipe, checkpoint.family
        if checkpoint.packed_file is not None or checkpoint.quantised is not None:
            raise CheckpointError(f"{checkpoint.path}: packed already; quantise the checkpoint that it was made of")
        check_tensors(checkpoint)
        model = build_on_meta(self._family.model_class, self._family.config)
        self._tied = set(model.all_tied_weights_keys) if self._family.tied else set()
        self._shapes = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in self._tied
        }
        self._matrices = [
            Matrix(name, self._shapes[name], self._end(name)) for name in _packable(model) if name in self._shapes
        ]
        self._matrices = [each for each in self._matrices if len(each.shape) == 3 or self._is_linear(model, each)]
        packed, total = (
            sum(map(_elements, shapes)) for shapes in ([m.shape for m in self._matrices], self._shapes.values())
        )
        if 2 * packed < total:
            raise CheckpointError(
                f"{checkpoint.path}: only {packed / max(1, total):.0%} of its weights are in modules that take packed matrices: "
                "found a swarm on it as it is"
            )
        for form in set(self.choice.forms.values()):
            check_format(form)

    def __repr__(self) -> str:
        return f"<FolderPack of {self._checkpoint.path}, {len(self._matrices)} matrices>"

    def _end(self, name: str) -> str:
        """Return the role of the embedding and the head; empty for other matrices."""
        is_embedding = name == f"{self._family.input_embedding}.weight"
        if is_embedding:
            return END if self._family.tied else TABLE
        return END if self._family.units_of_tensor(name)[:1] == (self._family.units - 1,) else ""

    def _is_linear(self, model: nn.Module, matrix: Matrix) -> bool:
        """Return whether a matrix is of a linear layer, or the embedding, whose rows are looked up."""
        return matrix.end != "" or isinstance(model.get_submodule(matrix.name.rpartition(".")[0]), nn.Linear)

    @cached_property
    def choice(self) -> FormatChoice:
        """The formats of the matrices. Raises CheckpointError if none can be packed."""
        config: Any = self._family.config
        heads = getattr(config, "num_attention_heads", None) or 1
        keys = getattr(config, "num_key_value_heads", None) or heads
        stacks = [each.shape[0] for each in self._matrices if len(each.shape) == 3]
        return choose(self._recipe, self._matrices, heads_per_key=heads / keys, experts=max(stacks, default=0))

    @cached_property
    def _new(self) -> dict[str, NewTensor]:
        """The packed tensors by name, in the order of the units that need them."""
        ordered = sorted(self._matrices, key=lambda each: self._unit_of(each.name))
        return {each.name: NewTensor.packed(each.name, each.shape, self.choice.forms[each.name]) for each in ordered}

    def _unit_of(self, name: str) -> int:
        return next(iter(self._family.units_of_tensor(name)), 0)

    @property
    def total_bytes(self) -> int:
        """About the bytes of the new weights."""
        plain = sum(_elements(shape) for name, shape in self._shapes.items() if name not in self._new)
        return sum(tensor.nbytes for tensor in self._new.values()) + plain * torch.float32.itemsize

    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write the checkpoint into the empty folder `out`, with one unit of the model in memory at a time.

        Raises CheckpointError if a tensor has values that are no finite numbers or cannot be fetched, OSError.
        """
        for name in sorted(SMALL_NAMES - {INDEX_NAME, PACKED_NAME}):
            if (source := self._checkpoint.small_file(name)) is not None:
                shutil.copyfile(source, out / name)
        new = list(self._new.values())
        keys = [key_of_text("general.architecture", ARCHITECTURE), key_of_number("general.quantization_version", 2)]
        with (out / WEIGHTS_NAME).open("wb") as file:
            writer = GgufWriter(file, keys, new)
            write_plain(self._write_packed(writer, progress), out, 0, None)
        tensors = {
            tensor.name: {
                "file": WEIGHTS_NAME,
                "format": self.choice.forms[tensor.name].name,
                "shape": list(tensor.shape),
                "begin": begin,
                "end": begin + tensor.nbytes,
            }
            for tensor, begin in zip(new, writer.begins, strict=True)
        }
        (out / PACKED_NAME).write_text(json.dumps({"format": 1, "tensors": tensors}) + "\n")

    def _write_packed(self, writer: GgufWriter, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
        """Write the packed tensors, and yield the others as float32."""
        done, total = 0, sum(tensor.nbytes for tensor in self._new.values())
        left = dict(self._shapes)
        for unit in range(self._family.units):
            values = self._values(unit)
            for name in [name for name in self._new if name in left and self._unit_of(name) == unit]:
                tensor = self._new[name]
                rows_OI = values[name].reshape(-1, tensor.shape[-1])
                form = self.choice.forms[name]
                read = _reading(rows_OI)
                writer.add(tensor, quantised_tiles(len(rows_OI), tensor.shape[-1], read, form, name))
                del left[name]
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
            for name, tensor_values in values.items():
                if name in left and name not in self._new:
                    yield name, tensor_values.float()
                    del left[name]

    def _values(self, unit: int) -> dict[str, Tensor]:
        """Return the tensors of one unit by the model's names for them."""
        names = self._checkpoint.tensors_of(unit, unit + 1)
        is_float32 = any(self._checkpoint.entries[name].dtype == "F32" for name in names)
        dtype = torch.float32 if is_float32 else self._checkpoint.dtype
        model = assemble(self._family, self._checkpoint.open_slices(names), unit, unit + 1, dtype=dtype)
        state: dict[str, Tensor] = model.state_dict()
        return state


def _reading(rows_OI: Tensor) -> Any:
    """Return the function that reads rows as float32."""
    return lambda first, end: rows_OI[first:end].float()


def _packable(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that may be packed: matrices of linear layers and embeddings, and stacked ones of experts whose
    rows are outputs."""
    for place, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding) and place.rpartition(".")[2] not in ROUTERS:
            yield f"{place}.weight"
        elif getattr(module, "is_transposed", None) is False:
            yield from (
                f"{place}.{name}"
                for name, parameter in module.named_parameters(recurse=False)
                if parameter.ndim == 3 and parameter.shape[-1] % FORMATS["Q8_0"].block == 0
            )


def _elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
