"""A GGUF file written anew with its matrices in other formats. Metadata and tokenizer stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.model.dequantize.gguf import fault_of_gguf, parts_of, read_gguf
from swarmnode.compute.model.packing.ggml import DTYPES, FORMATS, Format, dequantise
from swarmnode.compute.model.packing.gguf_writer import GgufWriter, NewTensor, key_of_number
from swarmnode.compute.model.packing.quantise import check_format, quantised_tiles
from swarmnode.compute.model.packing.recipes import END, TABLE, FormatChoice, FormatMix, Matrix, choose
from swarmnode.compute.model.trace import FOREIGN_ERRORS
from swarmnode.errors import CheckpointError, UsageError
from swarmnode.swarm.storage.content import Progress

FILE_TYPE, QUANTIZATION_VERSION, ALIGNMENT_KEY = (
    "general.file_type",
    "general.quantization_version",
    "general.alignment",
)
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
        parts = parts_of(file)
        try:
            self._readers = [read_gguf(part) for part in parts]
            self._tensors: list[Any] = [tensor for reader in self._readers for tensor in reader.tensors]
            swapped = any(reader.byte_order != "I" for reader in self._readers)
            told = self._value("split.tensors.count")
            self.choice  # noqa: B018  # raises if keys or tensors are not as they must be
        except (*FOREIGN_ERRORS, OSError) as error:
            raise CheckpointError(f"{file}: {fault_of_gguf(error)}") from error
        if swapped:
            raise CheckpointError(
                f"{file}: in the byte order of other machines; convert it with gguf-py's gguf-convert-endian"
            )
        if told is not None and told != len(self._tensors):
            raise CheckpointError(f"{file}: its parts have {len(self._tensors)} tensors, and should have {told}")
        if not again:
            self._check_plain()
        for form in set(self.choice.forms.values()):
            check_format(form)

    def __repr__(self) -> str:
        return f"<GgufRepack of {self.file}, {len(self._tensors)} tensors>"

    def _check_plain(self) -> None:
        """Raise UsageError if a matrix is packed already, and would be rounded a second time."""
        for tensor in self._tensors:
            own = tensor.tensor_type.name
            wanted = self.choice.forms.get(str(tensor.name))
            if own not in DTYPES and wanted is not None and wanted.name != own:
                raise UsageError(
                    f"{self.file}: {tensor.name} is packed already ({own}), and to round it twice costs quality: take the "
                    "model's F16 or BF16 file, or give --allow-requantize"
                )

    @cached_property
    def choice(self) -> FormatChoice:
        """The formats of the matrices. Raises CheckpointError if none can be packed."""
        names = {str(tensor.name) for tensor in self._tensors}
        matrices = [
            Matrix(str(tensor.name), _shape(tensor), _end(str(tensor.name), has_head=HEAD in names))
            for tensor in self._tensors
            if len(_shape(tensor)) > 1 and str(tensor.name).endswith("weight") and not _KEPT.search(str(tensor.name))
        ]
        return choose(
            self._recipe, matrices, heads_per_key=self._heads_per_key(), experts=self._number_of("expert_count", 0)
        )

    @cached_property
    def _new(self) -> list[NewTensor]:
        """The tensors to write, in the order of the file."""
        return [
            NewTensor.packed(str(tensor.name), _shape(tensor), form)
            if (form := self.choice.forms.get(str(tensor.name))) is not None
            else NewTensor(str(tensor.name), _shape(tensor), int(tensor.tensor_type), int(tensor.n_bytes))
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
            writer.add(new, self._pieces(tensor, new))
            done += new.nbytes
            if progress is not None:
                progress(done, total)

    def _pieces(self, tensor: Any, new: NewTensor) -> Iterator[Tensor]:
        """Yield the bytes of the new tensor; those of the old one if the format is the same."""
        packed_OB = tensor.data.reshape(-1, tensor.data.shape[-1]).view(np.uint8)
        form = self.choice.forms.get(new.name)
        if form is None or form.number == int(tensor.tensor_type):
            step = max(1, (1 << 22) // packed_OB.shape[-1])
            for first in range(0, len(packed_OB), step):
                yield torch.from_numpy(np.copy(packed_OB[first : first + step]))
            return
        own = FORMATS.get(tensor.tensor_type.name)
        inputs = new.shape[-1]

        def read(first: int, end: int) -> Tensor:
            return _values(np.copy(packed_OB[first:end]), own, tensor.tensor_type).view(end - first, inputs)

        yield from quantised_tiles(len(packed_OB), inputs, read, form, f"{self.file}: {new.name}")

    def _keys(self) -> list[bytes]:
        """Return the keys of the new file: those of the first part as they are there, but for those of its tensors' bytes."""
        import gguf

        reader = self._readers[0]
        fields = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
        end = reader.tensors[0].field.offset if reader.tensors else reader.data_offset
        ends = [*(field.offset for field in fields[1:]), end]
        kept = [
            bytes(reader.data[field.offset : last])
            for field, last in zip(fields, ends, strict=True)
            if field.name not in (FILE_TYPE, QUANTIZATION_VERSION, ALIGNMENT_KEY)
            and not field.name.startswith("split.")
        ]
        file_type = int(gguf.LlamaFileType[f"MOSTLY_{self._recipe.file_type}"])
        return [
            *kept,
            key_of_number(FILE_TYPE, file_type),
            key_of_number(QUANTIZATION_VERSION, PRESENT_VERSION),
        ]

    def _value(self, key: str) -> Any:
        """Return the value of a key; None if the file has none."""
        field = self._readers[0].fields.get(key)
        return None if field is None else field.contents()

    def _number_of(self, key: str, default: int) -> int:
        """Return a number of the model's architecture; of a list the largest one."""
        found = self._value(f"{self._value('general.architecture')}.{key}")
        numbers = found if isinstance(found, list) else [found]
        return max((int(number) for number in numbers if isinstance(number, int)), default=default)

    def _heads_per_key(self) -> float:
        heads = self._number_of("attention.head_count", 1)
        return heads / max(1, self._number_of("attention.head_count_kv", heads))


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _end(name: str, *, has_head: bool) -> str:
    """Return the role of the embedding and the head; empty for other matrices."""
    if name == HEAD or (name == EMBEDDING and not has_head):
        return END
    return TABLE if name == EMBEDDING else ""


def _values(packed_OB: Any, form: Format | None, kind: Any) -> Tensor:
    """Return the values of rows in any of GGUF's formats as float32, in a row."""
    packed_B = torch.from_numpy(packed_OB).view(-1)
    if form is not None:
        return dequantise(packed_B, form, packed_B.numel() // form.block_bytes * form.block)
    import gguf

    return torch.from_numpy(np.copy(gguf.dequantize(packed_OB, kind))).view(-1)
