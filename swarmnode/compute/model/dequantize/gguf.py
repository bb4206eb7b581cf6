"""GGUF, llama.cpp's single-file format, written as a plain checkpoint: config, names and tokenizer by transformers' reader.

transformers itself would hold the whole model in memory twice, so it is asked for one tensor at a time here. Experts that a
family's reader joins from several tensors are written at the end.
"""

from __future__ import annotations

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
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.dequantize.checkpoint import write_plain
from swarmnode.compute.model.dequantize.gguf_config import ROPE_TENSORS, GgufHeader, complete_config, generation_config
from swarmnode.compute.model.dequantize.gguf_tokenizer import TOKENS, GgufTokenizer
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS, build_on_meta
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import GENERATION_NAME, TOKENIZER_NAMES, Progress, has_tokenizer

SUFFIX = ".gguf"
DTYPE = torch.bfloat16
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at `path`: the file itself, or the only one in a folder without safetensors; None if there is none.

    Raises CheckpointError if there are several, or it is one part of a split model.
    """
    files = [path]
    if path.is_dir():
        files = [] if any(path.glob("*.safetensors")) else sorted(path.glob(f"*{SUFFIX}"))
    files = [file for file in files if file.name.endswith(SUFFIX) and file.is_file()]
    if split := [file.name for file in files if _SPLIT.search(file.name)]:
        raise CheckpointError(f"{split[0]} is one part of a model: put them together with `llama-gguf-split --merge`")
    if len(files) > 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files: give the path of one of them, as {files[0]}")
    return files[0] if files else None


class GgufCheckpoint:
    """Causal language model in a GGUF file. Raises CheckpointError if it cannot be read, or the package gguf is missing."""

    @lean()
    def __init__(self, file: Path) -> None:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"{file} is GGUF, and the package that reads it is missing: pip install 'swarmnode[gguf]'"
            ) from None
        from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

        self.file = file
        read: Any = load_gguf_checkpoint
        try:
            with quiet_loader():
                self._reader = gguf.GGUFReader(file)
                self._parsed: dict[str, Any] = read(str(file))
                self._header = GgufHeader(self._reader)
        except (*FOREIGN_ERRORS, OSError) as error:
            raise CheckpointError(
                f"{file}: not a GGUF file that transformers reads, or cut short: {error}; fetch it again"
            ) from error

    @property
    def plain_bytes(self) -> int:
        """Size of the plain weights in bytes."""
        return sum(int(tensor.n_elements) for tensor in self._reader.tensors) * DTYPE.itemsize

    @lean()
    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Write config, tokenizer and weights in bfloat16 into the empty folder `out`. Raises CheckpointError, OSError."""
        family = self._write_config(out)
        self._write_tokenizer(out)
        try:
            write_plain(self._all_tensors(family), out, self.plain_bytes, progress)
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors cannot be read: {error}; fetch the file again") from error

    def _all_tensors(self, family: Family) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's tensors by name. Raises CheckpointError if the file has others, misshapen ones, or lacks some."""
        model = build_on_meta(family.model_class, family.config)
        lacking = _shapes(family, model)
        for name, tensor in self._tensors(model):
            if lacking.pop(name, None) != tensor.shape:
                raise CheckpointError(
                    f"{self.file}: {name} is of shape {tuple(tensor.shape)}, "
                    "not as its config says; fetch the file again"
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
        except (*FOREIGN_ERRORS, CheckpointError) as error:
            raise CheckpointError(
                f"{self.file}: its config cannot be read: {error}; use the model's safetensors checkpoint"
            ) from error
        values = {**completed, "dtype": "bfloat16"}
        (out / CONFIG_FILE).write_text(json.dumps(values, indent=2, default=float) + "\n")
        return family_of(load_config(out / CONFIG_FILE))

    def _write_tokenizer(self, out: Path) -> None:
        """Write the tokenizer files beside the GGUF file, else the tokenizer within it, and the generation config.

        Raises CheckpointError if the tokenizer cannot be read.
        """
        fields = self._reader.fields
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
        for tensor in self._reader.tensors:
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
                raise CheckpointError(
                    f"{self.file}: {read.name} has no place in a {model.config.model_type} "
                    "model; use the model's safetensors checkpoint"
                )
        for name, weights in together.items():
            yield name, weights.to(DTYPE)


def _shapes(family: Family, model: Any) -> dict[str, torch.Size]:
    """Return the shapes of all tensors of the model, tied ones once."""
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name not in (model.all_tied_weights_keys if family.tied else ())
    }
