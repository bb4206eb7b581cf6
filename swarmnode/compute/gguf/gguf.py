"""GGUF, llama.cpp's single-file format, written as a plain checkpoint: config, names and tokenizer by transformers' reader.

transformers itself would hold the whole model in memory twice, so it is asked for one tensor at a time here. Experts that a
family's reader joins from several tensors are written at the end.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.gguf.gguf_config import ROPE_TENSORS, GgufHeader, complete_config, generation_config
from swarmnode.compute.gguf.gguf_reader import ARRAY, GgufReader, GgufTensor
from swarmnode.compute.gguf.gguf_tokenizer import TOKENS, GgufTokenizer
from swarmnode.compute.gguf.mixtures import KEYS, REFUSED, mixture_processor, read_mixture
from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import CONFIG_FILE, SINGLE_FILE, Checkpoint, check_layer_count, load_config
from swarmnode.compute.model.checkpoint_writer import write_plain
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS, build_on_meta
from swarmnode.compute.packing.ggml import F32, FORMATS, Format, check_finite
from swarmnode.compute.packing.tensor_entry import PART, TensorEntry, in_transformers_order
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import (
    GENERATION_NAME,
    GGUF_SUFFIX,
    PACKED_NAME,
    TOKENIZER_NAMES,
    Progress,
    has_tokenizer,
)

SUFFIX = GGUF_SUFFIX
DTYPE = torch.bfloat16
LINK_NAME = f"weights{SUFFIX}"  # in the folder beside the .swarm file
_EXPERTS = re.compile(r"(?P<name>.*\.ffn_(?P<kind>gate|down|up)_exps)\.weight")
_EXPERT_ROWS = ("gate", "up")  # the parts of a joined matrix, from above
_FAULTS = {
    r"architecture (\S+) is not supported": r"its architecture \1 is none that transformers reads from GGUF files: use the model's "
    "safetensors checkpoint",
    r"architecture (\S+) is not read, (.*)": r"its architecture \1 is none that is read from GGUF files: \2; use the model's "
    "safetensors checkpoint",
}
"""What is wrong with a file, by the errors of gguf's and transformers' readers"""
_SPLIT = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`: the file itself, or the only one in a folder without safetensors; None if there is none.

    Of a split model it is the first part. Raises CheckpointError if there are several models, or parts are missing.
    """
    files = [path]
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob(f"*{SUFFIX}"))
    files = [file for file in files if file.name.endswith(SUFFIX) and file.is_file()]
    files = list(dict.fromkeys(parts_of(file)[0] for file in files))
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files: give the path of one of them, as {files[0]}")
    return files[0] if files else None


def parts_of(file: Path) -> list[Path]:
    """Return all files of a model, in order, of which `file` is one. Raises CheckpointError if one is missing."""
    named = _SPLIT.fullmatch(file.name)
    if named is None:
        return [file]
    count = int(named["count"])
    parts = [file.with_name(f"{named['stem']}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{file.name} is one part of {count}, and {missing[0]} is missing: put all of them beside it"
        )
    return parts


def open_parts(file: Path) -> tuple[list[Path], list[GgufReader]]:
    """Return all files of a model, of which `file` is one, and their readers.

    Raises CheckpointError if one is missing or damaged, or if they have another number of tensors than the first one says.
    """
    parts = parts_of(file)
    try:
        readers = [GgufReader(part) for part in parts]
    except OSError as error:
        raise CheckpointError(f"{file}: {error}") from error
    count, field = sum(len(reader.tensors) for reader in readers), readers[0].fields.get("split.tensors.count")
    wanted = count if field is None else field.contents()
    if wanted != count:
        raise CheckpointError(f"{file}: its parts have {count} tensors, and should have {wanted}")
    return parts, readers


class GgufCheckpoint:
    """Causal language model in a GGUF file, or in the files of a split one. Raises CheckpointError if it cannot be read."""

    @lean()
    def __init__(self, file: Path) -> None:
        import gguf
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        self.file = file
        read: Any = load_gguf_checkpoint
        self._parts, self._readers = open_parts(file)
        try:
            first = self._readers[0]
            # Without its arrays, of which transformers only counts the tokens: it takes seconds for them.
            small = {
                name: field
                for name, field in first.fields.items()
                if not (name.startswith("tokenizer.") and field.kind == ARRAY)
            }
            self._header = GgufHeader(*self._readers)
            architecture = self._header.architecture
            if architecture in REFUSED:
                raise ValueError(f"architecture {architecture} is not read, {REFUSED[architecture]}")
            rest = SimpleNamespace(fields=small, tensors=first.tensors)
            self._parsed: dict[str, Any] = {"config": {}}
            if architecture not in KEYS:
                with quiet_loader(), _replaced(gguf, "GGUFReader", lambda *_: rest):
                    self._parsed = read(str(file))
        except (*FOREIGN_ERRORS, OSError, CheckpointError) as error:
            raise CheckpointError(f"{file}: {fault_of_gguf(error)}") from error
        if architecture in KEYS:
            try:
                self._parsed["config"] = read_mixture(self._header)
            except (*FOREIGN_ERRORS, CheckpointError) as error:
                raise CheckpointError(f"{file}: {error}; use the model's safetensors checkpoint") from error
        if TOKENS in first.fields:
            self._parsed["config"].setdefault("vocab_size", first.fields[TOKENS].count)

    @property
    def _stored(self) -> list[GgufTensor]:
        """The tensors of all parts, without those of layers that only guess tokens (multi-token prediction)."""
        layers, guessing = self._header.said("block_count"), self._header.said("nextn_predict_layers") or 0
        skipped = tuple(f"blk.{layer}." for layer in range(layers - guessing, layers)) if guessing else ()
        tensors = (tensor for reader in self._readers for tensor in reader.tensors)
        return [tensor for tensor in tensors if not tensor.name.startswith(skipped)]

    @property
    def header_bytes(self) -> int:
        """Size of the header of the first file in bytes."""
        return self._readers[0].data_offset

    @property
    def plain_bytes(self) -> int:
        """Size of the plain weights in bytes."""
        return sum(tensor.n_elements for tensor in self._stored) * DTYPE.itemsize

    @lean()
    def outline(self, folder: Path) -> Checkpoint:
        """Return the checkpoint that `pack` would make, with sizes and without weights; `folder` gets its config. Raises
        CheckpointError."""
        family = self._write_config(folder)
        model = build_on_meta(family.model_class, family.config)
        try:
            index, plain = self._index(self._names(model), _shapes(family, model))
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors do not make its model: {error}") from error
        return _Outline(self.file, index, plain, folder)

    @lean()
    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and weights in bfloat16 into the empty folder `out`. Raises CheckpointError, OSError."""
        family = self._write_config(out)
        self._write_tokenizer(out)
        try:
            model = build_on_meta(family.model_class, family.config)
            tensors = self._tensors(self._names(model), self._stored, DTYPE)
            write_plain(self._checked(tensors, _shapes(family, model)), out, self.plain_bytes, progress)
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors cannot be read: {error}; fetch the file again") from error

    @lean()
    def pack(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and index into the empty folder `out`, a link to the file, and its few tensors that cannot stay
        packed, in float32.

        Raises CheckpointError, OSError.
        """
        family = self._write_config(out)
        self._write_tokenizer(out)
        try:
            model = build_on_meta(family.model_class, family.config)
            names = self._names(model)
            index, lacking = self._index(names, _shapes(family, model))
            total, done = sum(place.tensor.n_bytes for place in index), 0
            for place in index:
                packed_B = torch.from_numpy(np.copy(place.tensor.data)).view(-1)
                check_finite(packed_B, place.form, f"{self.file}: {place.source}")
                done += place.tensor.n_bytes
                if progress is not None:
                    progress(done, total)
            kept = {each.source for each in index}
            rest = [tensor for tensor in self._stored if tensor.name not in kept]
            plain = self._checked(self._tensors(names, rest, torch.float32), lacking)
            write_plain(plain, out, sum(tensor.n_elements for tensor in rest) * 4, None)
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors cannot be read: {error}") from error
        files = {id(tensor): number for number, reader in enumerate(self._readers, 1) for tensor in reader.tensors}
        tensors = {each.name: each.values(self._link_name(files[id(each.tensor)])) for each in index}
        (out / PACKED_NAME).write_text(json.dumps({"format": 1, "tensors": tensors}) + "\n")
        for number, part in enumerate(self._parts, 1):
            (out / self._link_name(number)).symlink_to(part.absolute())

    def _link_name(self, number: int) -> str:
        """Return the name of the link to a part, counted from 1."""
        count = len(self._readers)
        return LINK_NAME if count == 1 else f"{Path(LINK_NAME).stem}-{number:05d}-of-{count:05d}{SUFFIX}"

    def _index(
        self, names: Mapping[str, str], shapes: Mapping[str, torch.Size]
    ) -> tuple[list[_Packed], dict[str, torch.Size]]:
        """Return the places of the tensors that stay packed, and the shapes of the model's other ones. `names` are those of the
        model's tensors by the file's."""
        processor = self._processor()
        found: list[_Packed] = []
        for tensor in self._stored:
            place = self._place(tensor, processor, names)
            if place is not None and _fits(place, shapes):
                found.append(place)
        whole = {each.parameter for each in found}
        return found, {name: shape for name, shape in shapes.items() if name not in whole}

    def _place(self, tensor: GgufTensor, processor: Any, names: Mapping[str, str]) -> _Packed | None:
        """Return the place of a tensor that can stay packed; None for small ones, other formats, and other orders than of rows."""
        form = FORMATS.get(tensor.tensor_type.name)
        shape = tensor.shape
        if form is None or form.name == F32 or len(shape) not in (2, 3) or shape[-1] % form.block:
            return None
        part = _EXPERTS.fullmatch(tensor.name)
        if part and part["name"] in names and hasattr(processor, "GGUF_MOE_WEIGHTS_PATTERN"):
            suffix = f"{PART}{_EXPERT_ROWS.index(part['kind'])}" if part["kind"] in _EXPERT_ROWS else ""
            return _Packed(tensor, form, shape, names[part["name"]] + suffix, 0)
        if len(shape) == 3:
            return None
        probe = np.broadcast_to(np.float32(0), shape)
        read = self._read(processor, tensor.name, probe, names)
        if read.name not in names:
            return None
        if read.weights is probe:
            return _Packed(tensor, form, shape, names[read.name], 0)
        # The reader changes the order of rows: is it that of a rotary projection, interleaved in each head?
        probe_OI = torch.arange(shape[0], dtype=torch.float32)[:, None].expand(shape)
        found_OI = torch.from_numpy(np.copy(self._read(processor, tensor.name, probe_OI.numpy(), names).weights))
        config = self._parsed["config"]
        for heads in {config.get("num_attention_heads"), config.get("num_key_value_heads")} - {None}:
            whole = found_OI.shape == probe_OI.shape and shape[0] % (2 * heads) == 0
            if whole and torch.equal(in_transformers_order(probe_OI.contiguous(), heads), found_OI):
                return _Packed(tensor, form, shape, names[read.name], int(heads))
        return None

    def _read(
        self, processor: Any, name: str, weights: Any, names: Mapping[str, str], together: dict[str, Any] | None = None
    ) -> Any:
        """Return the name and weights that transformers' converter makes of a tensor; `together` collects parts of joined ones."""
        parsed = {**self._parsed, "tensors": {} if together is None else together}
        return processor.process(weights=weights, name=name, tensor_key_mapping=names, parsed_parameters=parsed)

    def _checked(
        self, tensors: Iterator[tuple[str, Tensor]], lacking: dict[str, torch.Size]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield these tensors.

        Raises CheckpointError if one is not among the lacking ones or holds NaN or infinity, or if a lacking one is not there.
        """
        for name, tensor in tensors:
            if lacking.pop(name, None) != tensor.shape:
                raise CheckpointError(
                    f"{self.file}: {name} is of shape {tuple(tensor.shape)}, "
                    "not as its config says; fetch the file again"
                )
            if not tensor.isfinite().all():
                raise CheckpointError(
                    f"{self.file}: {name} holds values that are no finite numbers: it is damaged; fetch the file again"
                )
            yield name, tensor
        if lacking:
            raise CheckpointError(
                f"{self.file}: lacks {len(lacking)} tensors of the "
                f"model, as {next(iter(lacking))}; fetch the file again"
            )

    def _write_config(self, out: Path) -> Family:
        try:
            completed = complete_config(self._header, self._parsed["config"])
            values = json.dumps({**completed, "dtype": "bfloat16"}, indent=2, default=float)
        except (*FOREIGN_ERRORS, CheckpointError) as error:
            raise CheckpointError(
                f"{self.file}: its config cannot be read: {error}; use the model's safetensors checkpoint"
            ) from error
        (out / CONFIG_FILE).write_text(f"{values}\n")
        config = load_config(out / CONFIG_FILE)
        check_layer_count(config, len(self._stored), self.file)
        return family_of(config)

    def _write_tokenizer(self, out: Path) -> None:
        """Write the tokenizer files beside the GGUF file, else the tokenizer within it, and the generation config.

        Raises CheckpointError if the tokenizer cannot be read.
        """
        fields = self._readers[0].fields
        beside = [name for name in TOKENIZER_NAMES if (self.file.parent / name).is_file()]
        advice = "fetch the file again" if has_tokenizer(beside) else "put the model's tokenizer.json beside it"
        try:
            tokenizer = GgufTokenizer(fields)
            if has_tokenizer(beside):
                for name in beside:
                    shutil.copyfile(self.file.parent / name, out / name)
            elif TOKENS in fields:
                tokenizer.write(out)
            values = generation_config(fields, tokenizer)
        except (*FOREIGN_ERRORS, OSError, CheckpointError) as error:
            raise CheckpointError(f"{self.file}: its tokenizer cannot be read ({error}): {advice}") from error
        (out / GENERATION_NAME).write_text(json.dumps(values, indent=2) + "\n")

    def _processor(self) -> Any:
        """Return transformers' converter of this architecture's tensors."""
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        if self._header.architecture in KEYS:
            return mixture_processor(self._parsed["config"])
        kind: Any = TENSOR_PROCESSORS.get(self._header.architecture, TensorProcessor)
        return kind(config=self._parsed["config"])

    def _names(self, model: Any) -> Mapping[str, str]:
        """Return the names of the model's tensors by those of the file."""
        import gguf
        from transformers.modeling_gguf_pytorch_utils import get_gguf_hf_weights_map

        once = functools.cache(gguf.get_tensor_name_map)  # transformers asks for it at each submodule
        with _replaced(gguf, "get_tensor_name_map", once):
            own = self._header.architecture if self._header.architecture in KEYS else None
            names: Mapping[str, str] = get_gguf_hf_weights_map(model, self._processor(), own)
        return names

    def _tensors(
        self, names: Mapping[str, str], tensors: Sequence[GgufTensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors of the file by their names in the model; `names` has these by the file's.

        Raises CheckpointError if one has no place in the model.
        """
        from gguf import dequantize

        processor = self._processor()
        together: dict[str, Any] = {}
        for tensor in tensors:
            if tensor.name in ROPE_TENSORS:  # the config holds them
                continue
            weights = dequantize(tensor.data, tensor.tensor_type)
            read = self._read(processor, tensor.name, weights, names, together)
            if read.name in names:
                yield names[read.name], torch.from_numpy(np.copy(read.weights)).to(dtype)
            elif read.name is not None:
                raise CheckpointError(
                    f"{self.file}: {read.name} has no place in a {self._parsed['config'].get('model_type')} "
                    "model; use the model's safetensors checkpoint"
                )
        for name, weights in together.items():
            yield name, weights.to(dtype)


@contextmanager
def _replaced(module: ModuleType, name: str, value: Any) -> Iterator[None]:
    """Let a module's attribute have another value within the block."""
    own = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, own)


def fault_of_gguf(error: BaseException) -> str:
    """Return what is wrong with a GGUF file, in words, by the error of its reader here or of transformers."""
    text = " ".join(str(error).split())
    if isinstance(error, CheckpointError):
        return f"{text}: fetch the file again"
    for pattern, told in _FAULTS.items():
        if found := re.search(pattern, text):
            return found.expand(told)
    return f"not a GGUF file that transformers reads, or cut short: {text}"


@dataclass(frozen=True)
class _Packed:
    """Place of a tensor that stays packed: the file's tensor, its format and shape, and its name in the model's index."""

    tensor: GgufTensor
    form: Format
    shape: tuple[int, ...]
    name: str
    heads: int

    @property
    def source(self) -> str:
        """Name in the file."""
        return self.tensor.name

    @property
    def parameter(self) -> str:
        """Name of the model's parameter that it is, or is a part of."""
        return self.name.partition(PART)[0]

    def values(self, file: str) -> dict[str, Any]:
        """Return the entry of the index; `file` is the name of the file."""
        begin = self.tensor.data_offset
        place: dict[str, Any] = {"file": file, "format": self.form.name, "shape": list(self.shape)}
        place |= {"begin": begin, "end": begin + self.tensor.n_bytes}
        return {**place, "heads": self.heads} if self.heads else place


def _fits(place: _Packed, shapes: Mapping[str, torch.Size]) -> bool:
    """Return whether the model has a parameter of this shape there. A part may have fewer rows."""
    wanted = shapes.get(place.parameter)
    if wanted is None or PART not in place.name:
        return wanted == place.shape
    return (wanted[0], wanted[1], wanted[2]) == (place.shape[0], 2 * place.shape[1], place.shape[2])


class _Outline(Checkpoint):
    """Checkpoint whose tensors are known by name, shape and format only: the packed ones of `index`, and others by their shapes."""

    def __init__(self, file: Path, index: Sequence[_Packed], plain: Mapping[str, torch.Size], folder: Path) -> None:
        self.path = folder
        self.entries = {
            name: TensorEntry(folder / SINGLE_FILE, F32, tuple(shape), 0, shape.numel() * torch.float32.itemsize)
            for name, shape in plain.items()
        }
        for each in index:
            self.entries[each.name] = TensorEntry(file, each.form.name, each.shape, 0, each.tensor.n_bytes)


def _shapes(family: Family, model: Any) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of the model, tied ones once."""
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name not in (model.all_tied_weights_keys if family.tied else ())
    }
