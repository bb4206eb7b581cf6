"""GGUF, llama.cpp's single-file format, written as a plain checkpoint: config, names and tokenizer by transformers' reader.

transformers itself would hold the whole model in memory twice, so it is asked for one tensor at a time here. Experts that a
family's reader joins from several tensors are written at the end.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import CONFIG_FILE, Checkpoint, TensorEntry, load_config
from swarmnode.compute.model.dequantize.checkpoint import write_plain
from swarmnode.compute.model.dequantize.gguf_config import ROPE_TENSORS, GgufHeader, complete_config, generation_config
from swarmnode.compute.model.dequantize.gguf_tokenizer import TOKENS, GgufTokenizer
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS, build_on_meta
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import GENERATION_NAME, TOKENIZER_NAMES, Progress, has_tokenizer
from swarmnode.version import missing_package

SUFFIX = ".gguf"
DTYPE = torch.bfloat16
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`: the file itself, or the only one in a folder without safetensors; None if there is none. The
    file of a split model is its first part.

    Raises CheckpointError if there are several, or a part is missing.
    """
    files = [path]
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob(f"*{SUFFIX}"))
    files = [file for file in files if file.name.endswith(SUFFIX) and file.is_file()]
    models = list({parts_of(file)[0]: None for file in files})
    if len(models) > 1:
        raise CheckpointError(f"{path} holds {len(models)} GGUF files: give the path of one of them, as {models[0]}")
    return models[0] if models else None


def parts_of(file: Path) -> list[Path]:
    """Return the parts of the model that `file` is a part of, in their order; `file` alone if the model is not split. Raises
    CheckpointError if a part is missing."""
    split = _SPLIT.search(file.name)
    if split is None:
        return [file]
    count, stem = int(split[2]), file.name[: split.start()]
    parts = [file.with_name(f"{stem}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing or not parts:
        raise CheckpointError(f"{file} is one of {count} parts: put all of them into its folder, as {missing[:1]}")
    return parts


class GgufCheckpoint:
    """Causal language model in a GGUF file, or in the files of a split one. Raises CheckpointError if it cannot be read, or the
    package gguf is missing."""

    @lean()
    def __init__(self, file: Path) -> None:
        try:
            import gguf as _installed  # noqa: F401
        except ImportError:
            raise CheckpointError(f"{file} is GGUF, and {missing_package('gguf')}") from None
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        self.file = file
        read: Any = load_gguf_checkpoint
        try:
            self._readers = [_plain_reader(part) for part in parts_of(file)]
            self._header = GgufHeader(*self._readers)
            with quiet_loader(), _reads(self._readers[0]):
                self._parsed: dict[str, Any] = read(str(file))
        except (*FOREIGN_ERRORS, OSError) as error:
            raise CheckpointError(f"{file}: not a GGUF file that transformers reads, or cut short: {error}") from error

    @property
    def header_bytes(self) -> int:
        """Size of the header of the first file in bytes."""
        return int(self._readers[0].data_offset)

    @property
    def plain_bytes(self) -> int:
        """Size of the plain weights in bytes."""
        return sum(int(tensor.n_elements) for tensor in self._stored()) * DTYPE.itemsize

    def _stored(self) -> Iterator[Any]:
        return (tensor for reader in self._readers for tensor in reader.tensors)

    @lean()
    def outline(self, folder: Path) -> Checkpoint:
        """Return the checkpoint that `write` would make, with sizes and without weights; `folder` gets its config. Raises
        CheckpointError."""
        return _Outline(self.file, self._write_config(folder), folder)

    @lean()
    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and weights in bfloat16 into the empty folder `out`. Raises CheckpointError, OSError."""
        family = self._write_config(out)
        self._write_tokenizer(out)
        try:
            write_plain(self._all_tensors(family), out, self.plain_bytes, progress)
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors cannot be read: {error}") from error

    def _all_tensors(self, family: Family) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by name. Raises CheckpointError if the file has others, misshapen ones, or lacks some."""
        model = build_on_meta(family.model_class, family.config)
        lacking = _shapes(family, model)
        for name, tensor in self._tensors(model):
            if lacking.pop(name, None) != tensor.shape:
                raise CheckpointError(f"{self.file}: {name} is of shape {tuple(tensor.shape)}, not as its config says")
            yield name, tensor
        if lacking:
            raise CheckpointError(f"{self.file}: lacks {len(lacking)} tensors of the model, as {next(iter(lacking))}")

    def _write_config(self, out: Path) -> Family:
        try:
            completed = complete_config(self._header, self._parsed["config"])
        except (*FOREIGN_ERRORS, CheckpointError) as error:
            raise CheckpointError(f"{self.file}: its config cannot be read: {error}") from error
        values = {**completed, "dtype": "bfloat16"}
        (out / CONFIG_FILE).write_text(json.dumps(values, indent=2, default=float) + "\n")
        return family_of(load_config(out / CONFIG_FILE))

    def _write_tokenizer(self, out: Path) -> None:
        """Write the tokenizer files beside the GGUF file, else the tokenizer within it, and the generation config.

        Raises CheckpointError if the tokenizer cannot be read.
        """
        fields = self._readers[0].fields
        beside = [name for name in TOKENIZER_NAMES if (self.file.parent / name).is_file()]
        try:
            if has_tokenizer(beside):
                for name in beside:
                    shutil.copyfile(self.file.parent / name, out / name)
            elif TOKENS in fields:
                GgufTokenizer(fields).write(self.file, out)
            values = generation_config(fields)
        except (*FOREIGN_ERRORS, OSError, CheckpointError) as error:
            raise CheckpointError(
                f"{self.file}: its tokenizer cannot be read ({error}): put the model's tokenizer.json beside it"
            ) from error
        (out / GENERATION_NAME).write_text(json.dumps(values, indent=2) + "\n")

    def _tensors(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the file's tensors by their names in `model`, which has no weights.

        Raises CheckpointError if one has no place in the model.
        """
        from gguf import dequantize
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        processor: Any = TENSOR_PROCESSORS.get(self._header.architecture, TensorProcessor)(
            config=self._parsed["config"]
        )  # type: ignore[no-untyped-call]
        names = get_gguf_hf_weights_map(model, processor)
        together: dict[str, Any] = {}
        for tensor in self._stored():
            if tensor.name in ROPE_TENSORS:  # the config holds them
                continue
            read = processor.process(
                weights=dequantize(tensor.data, tensor.tensor_type),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={**self._parsed, "tensors": together},
            )
            if read.name in names:
                yield names[read.name], torch.from_numpy(np.copy(read.weights)).to(DTYPE)
            elif read.name is not None:
                raise CheckpointError(f"{self.file}: {read.name} has no place in a {model.config.model_type} model")
        for name, weights in together.items():
            yield name, weights.to(DTYPE)


def _plain_reader(file: Path) -> Any:
    """Return the gguf package's reader of `file`, on a plain array: slices of a memory map take three times as long to make, and
    each word of a vocabulary is one."""
    import gguf

    class PlainReader(gguf.GGUFReader):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if isinstance(value, np.memmap) else value)

    return PlainReader(file)


@contextlib.contextmanager
def _reads(reader: Any) -> Iterator[None]:
    """Give transformers `reader` for any file that it reads inside the context, since reading a header takes seconds."""
    import gguf

    original: Any = gguf.GGUFReader
    gguf.GGUFReader = lambda _path: reader  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


class _Outline(Checkpoint):
    """Checkpoint whose tensors are known by name and shape only."""

    def __init__(self, file: Path, family: Family, folder: Path) -> None:
        self.path = folder
        shapes = _shapes(family, build_on_meta(family.model_class, family.config))
        self.entries = {
            name: TensorEntry(file, "BF16", tuple(shape), 0, shape.numel() * DTYPE.itemsize)
            for name, shape in shapes.items()
        }


def _shapes(family: Family, model: Any) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of the model, tied ones once."""
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name not in (model.all_tied_weights_keys if family.tied else ())
    }
