"""Models written anew with packed matrices, as GGUF files and as folders.

A GGUF file written anew with its matrices in other formats. Metadata and tokenizer stay as they are.

Rounding of matrices to GGUF's formats, row by row: by ggml if it is there, else by the package gguf, which has fewer formats.

Writer of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): the header first, then the tensors in order.

A checkpoint of safetensors written anew with its matrices in GGUF's formats: a folder that a swarm is founded on as it is.

The folder has transformers' config and tokenizer, `packed.json`, the packed matrices in a GGUF file under the names of the model's
parameters, and all other tensors in float32.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor, nn

from swarmnode.compute.gguf.gguf import fault_of_gguf, open_parts
from swarmnode.compute.gguf.gguf_config import GgufHeader
from swarmnode.compute.model.assemble import assemble, check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.checkpoint_writer import write_plain
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS, build_on_meta
from swarmnode.compute.packing.ggml import DTYPES, FORMATS, PACKAGE, Format, check_finite, dequantise, library
from swarmnode.compute.packing.recipes import END, TABLE, FormatChoice, FormatMix, Matrix, choose
from swarmnode.errors import CheckpointError, LocalError, UsageError
from swarmnode.swarm.storage.content import INDEX_NAME, PACKED_NAME, SMALL_NAMES, Progress
from swarmnode.version import missing_package

TILE_ELEMENTS = 1 << 20  # rounded in one call: 4 MiB as float32
LARGE = 6e4  # scales of larger values may overflow float16
PYTHON_FORMATS = frozenset({"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *DTYPES})
"""Formats that the package gguf rounds to"""


def check_format(form: Format) -> None:
    """Raise LocalError if this machine cannot round to a format."""
    ggml = library()
    if form.name not in PYTHON_FORMATS and (ggml is None or ggml.quantise_rows is None):
        raise LocalError(
            f"rounding to {form.name} needs ggml, and {missing_package(PACKAGE)}; or choose q4_0 to q5_1 or q8_0"
        )


def quantise(values_OI: Tensor, form: Format, name: str) -> Tensor:
    """Return rows (O, bytes of a row) as uint8 in a format, rounded from float32 (O, I).

    Raises ValueError if a row has no whole blocks, CheckpointError if the tensor `name` has values that are no finite numbers, or
    too large ones, LocalError as `check_format` does.
    """
    rows, inputs = values_OI.shape
    row_bytes = form.row_bytes(inputs)
    largest = float(values_OI.abs().max()) if values_OI.numel() else 0.0
    if not largest < torch.inf:  # also NaN
        raise CheckpointError(f"{name} holds values that are no finite numbers; fetch the checkpoint again")
    packed_OB = _rounded(values_OI.contiguous(), form).view(rows, row_bytes)
    if largest > LARGE:
        check_finite(packed_OB.view(-1), form, f"{name} is too large for {form.name}: rounded it")
    return packed_OB


def _rounded(values_OI: Tensor, form: Format) -> Tensor:
    """Return the bytes of rows in a format, as uint8."""
    if form.name in DTYPES:
        return values_OI.to(DTYPES[form.name]).view(torch.uint8)
    rows, inputs = values_OI.shape
    ggml = library()
    if ggml is not None and ggml.quantise_rows is not None:
        packed_OB = torch.empty(rows, form.row_bytes(inputs), dtype=torch.uint8)
        ggml.quantise_rows(form.number, values_OI.data_ptr(), packed_OB.data_ptr(), 0, rows, inputs, None)
        return packed_OB
    check_format(form)
    import gguf

    return torch.from_numpy(gguf.quantize(values_OI.numpy(), gguf.GGMLQuantizationType[form.name]))


def quantised_tiles(
    rows: int, inputs: int, read: Callable[[int, int], Tensor], form: Format, name: str
) -> Iterator[Tensor]:
    """Yield the rows of the tensor `name` in a format, some at a time, in order: at most TILE_ELEMENTS for each of torch's threads.

    `read(first, end)` returns rows as float32. Raises as `quantise` and `read` do.
    """
    height = max(1, TILE_ELEMENTS // inputs)
    threads = torch.get_num_threads()
    begins = range(0, rows, height)

    def tile(first: int) -> Tensor:
        return quantise(read(first, min(first + height, rows)), form, name)

    with ThreadPoolExecutor(threads, thread_name_prefix="quantise") as workers:
        for first in range(0, len(begins), threads):  # not all at once: memory stays bounded
            yield from workers.map(tile, begins[first : first + threads])


MAGIC, VERSION = b"GGUF", 3
ALIGNMENT = 32
UINT32, STRING = 4, 8  # numbers of value types


def _text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key_of_text(key: str, value: str) -> bytes:
    """Return a key with a text, as a GGUF file has it."""
    return _text(key) + struct.pack("<I", STRING) + _text(value)


def key_of_number(key: str, value: int) -> bytes:
    """Return a key with an unsigned number of 32 bits, as a GGUF file has it."""
    return _text(key) + struct.pack("<II", UINT32, value)


@dataclass(frozen=True)
class NewTensor:
    """Tensor to be written: its name, its shape with the outermost dimension first, GGUF's number of its format, and its bytes."""

    name: str
    shape: tuple[int, ...]
    form: int
    nbytes: int

    @classmethod
    def packed(cls, name: str, shape: tuple[int, ...], form: Format) -> NewTensor:
        """Describe a tensor in a format that is kept packed. Raises ValueError if a row has no whole blocks."""
        return cls(name, shape, form.number, math.prod(shape[:-1]) * form.row_bytes(shape[-1]))


class GgufWriter:
    """Writer of one GGUF file into the open file `out`: keys as they are in a file, then `tensors`, whose bytes are added in order.

    Raises OSError.
    """

    def __init__(self, out: IO[bytes], keys: Sequence[bytes], tensors: Sequence[NewTensor]) -> None:
        self._out = out
        header = MAGIC + struct.pack("<IQQ", VERSION, len(tensors), len(keys)) + b"".join(keys)
        offset, offsets = 0, list[int]()
        for tensor in tensors:
            sizes = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
            header += _text(tensor.name) + sizes + struct.pack("<IQ", tensor.form, offset)
            offsets.append(offset)
            offset += tensor.nbytes + -tensor.nbytes % ALIGNMENT
        header += bytes(-len(header) % ALIGNMENT)
        self.begins = [len(header) + place for place in offsets]
        self.total_bytes = len(header) + offset
        out.write(header)

    def add(self, tensor: NewTensor, pieces: Iterable[Tensor]) -> None:
        """Write the next tensor, whose bytes are those of the `pieces`. Raises ValueError if their number is another one."""
        written = 0
        for piece in pieces:
            self._out.write(piece.contiguous().view(-1).numpy().data)
            written += piece.nbytes
        if written != tensor.nbytes:
            raise ValueError(f"{tensor.name} has {written} bytes, not {tensor.nbytes}")
        self._out.write(bytes(-written % ALIGNMENT))


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
                read = partial(_float_rows, rows_OI)
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


def _float_rows(rows_OI: Tensor, first: int, end: int) -> Tensor:
    return rows_OI[first:end].float()


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


FILE_TYPE, QUANTIZATION_VERSION = "general.file_type", "general.quantization_version"
ALIGNMENT_KEY = "general.alignment"
PRESENT_VERSION = 2  # of GGUF's formats
HEAD, EMBEDDING = "output.weight", "token_embd.weight"
# Small matrices, whose rounding costs much: by `llama_model_quantize` of llama.cpp's src/llama-quant.cpp.
_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp|altup|laurel|per_layer_model_proj|^position_embd|^token_types|ssm_conv1d|shortconv\.conv|"
    r"time_mix_(first|w0|w1|w2|v0|v1|v2|a0|a1|a2|g1|g2|decay_w1|decay_w2|lerp_fused)|attn_rel_b"
)


class GgufRepack:
    """GGUF file whose matrices are to be written in the formats of a recipe.

    Raises CheckpointError if it cannot be read, UsageError if its matrices are packed already, unless `again`, LocalError if a
    format needs a missing package.
    """

    def __init__(self, file: Path, recipe: FormatMix, *, again: bool = False) -> None:
        self.file, self._recipe = file, recipe
        _, self._readers = open_parts(file)
        self._tensors: list[Any] = [tensor for reader in self._readers for tensor in reader.tensors]
        try:
            self.choice  # noqa: B018  # raises if keys or tensors are not as they must be
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{file}: {fault_of_gguf(error)}") from error
        for tensor in [] if again else self._tensors:  # a matrix would be rounded a second time
            own, wanted = tensor.tensor_type.name, self.choice.forms.get(str(tensor.name))
            if own not in DTYPES and wanted is not None and wanted.name != own:
                raise UsageError(
                    f"{self.file}: {tensor.name} is packed already ({own}), and to round it twice costs quality: take the "
                    "model's F16 or BF16 file, or give --allow-requantize"
                )
        for form in set(self.choice.forms.values()):
            check_format(form)

    @cached_property
    def choice(self) -> FormatChoice:
        """The formats of the matrices. Raises CheckpointError if none can be packed."""
        shapes = {str(tensor.name): tensor.shape for tensor in self._tensors}
        ends = {HEAD: END, EMBEDDING: TABLE} if HEAD in shapes else {EMBEDDING: END}
        matrices = [
            Matrix(name, shape, ends.get(name, ""))
            for name, shape in shapes.items()
            if len(shape) > 1 and name.endswith("weight") and not _KEPT.search(name)
        ]
        header = GgufHeader(*self._readers)

        def number_of(key: str, default: int) -> int:
            """Return a number of the model's architecture; of a list the largest one."""
            found = header.said(key)
            numbers = found if isinstance(found, list) else [found]
            return max((int(number) for number in numbers if isinstance(number, int)), default=default)

        heads = number_of("attention.head_count", 1)
        heads_per_key = heads / max(1, number_of("attention.head_count_kv", heads))
        return choose(self._recipe, matrices, heads_per_key=heads_per_key, experts=number_of("expert_count", 0))

    @cached_property
    def _new(self) -> list[NewTensor]:
        """The tensors to write, in the order of the file."""
        return [
            NewTensor.packed(str(tensor.name), tensor.shape, form)
            if (form := self.choice.forms.get(str(tensor.name))) is not None
            else NewTensor(str(tensor.name), tensor.shape, int(tensor.tensor_type), int(tensor.n_bytes))
            for tensor in self._tensors
        ]

    @property
    def total_bytes(self) -> int:
        """About the bytes of the new file."""
        return int(self._readers[0].data_offset) + sum(tensor.nbytes for tensor in self._new)

    def write(self, out: IO[bytes], progress: Progress | None = None) -> None:
        """Write the new file into the open file `out`, some rows at a time.

        Raises CheckpointError if a tensor has values that are no finite numbers, OSError.
        """
        writer = GgufWriter(out, self._keys(), self._new)
        done, total = 0, sum(tensor.nbytes for tensor in self._new)
        for tensor, new in zip(self._tensors, self._new, strict=True):
            # The bytes of the old tensor if the format is the same.
            packed_OB = tensor.data.reshape(-1, tensor.data.shape[-1]).view(np.uint8)
            form = self.choice.forms.get(new.name)
            if form is None or form.number == int(tensor.tensor_type):
                step = max(1, (1 << 22) // packed_OB.shape[-1])
                starts = range(0, len(packed_OB), step)
                writer.add(new, (torch.from_numpy(np.copy(packed_OB[first : first + step])) for first in starts))
            else:
                read = partial(
                    _values, packed_OB, FORMATS.get(tensor.tensor_type.name), tensor.tensor_type, new.shape[-1]
                )
                name = f"{self.file}: {new.name}"
                writer.add(new, quantised_tiles(len(packed_OB), new.shape[-1], read, form, name))
            done += new.nbytes
            if progress is not None:
                progress(done, total)

    def _keys(self) -> list[bytes]:
        """Return the keys of the new file: those of the first part as they are there, but for those of its tensors' bytes."""
        import gguf

        kept = [
            bytes(field.entry)
            for name, field in self._readers[0].fields.items()
            if name not in (FILE_TYPE, QUANTIZATION_VERSION, ALIGNMENT_KEY) and not name.startswith("split.")
        ]
        file_type = int(gguf.LlamaFileType[f"MOSTLY_{self._recipe.file_type}"])
        return [*kept, key_of_number(FILE_TYPE, file_type), key_of_number(QUANTIZATION_VERSION, PRESENT_VERSION)]


def _values(packed_OB: Any, form: Format | None, kind: Any, inputs: int, first: int, end: int) -> Tensor:
    """Return rows [first, end) (N, `inputs`) as float32, of any of GGUF's formats: `form`, or the `kind` of the package gguf."""
    rows_NB = np.copy(packed_OB[first:end])
    packed_B = torch.from_numpy(rows_NB).view(-1)
    if form is not None:
        return dequantise(packed_B, form, (end - first) * inputs).view(-1, inputs)
    import gguf

    return torch.from_numpy(np.copy(gguf.dequantize(rows_NB, kind))).view(-1, inputs)
