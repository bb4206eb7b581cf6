"""GGUF, llama.cpp's format of one file, written as a plain checkpoint: config, names and tokenizer by transformers' reader.

transformers itself would have the whole model in memory twice; here it is asked for one tensor after the other. Experts that a
family's reader puts together of several tensors are written at the end.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import CONFIG_FILE, load_config
from swarmnode.compute.model.dequantize.checkpoint import write_plain
from swarmnode.compute.model.family import Family, family_of
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.trace import FOREIGN_ERRORS, build_on_meta
from swarmnode.errors import CheckpointError
from swarmnode.swarm.storage.content import TOKENIZER_NAMES, Progress, has_tokenizer

SUFFIX = ".gguf"
DTYPE = torch.bfloat16
_SPLIT = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# Factors of the rotary frequencies (a Llama's from 3.1 on, and of LongRoPE), which stand beside the weights.
FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS = (
    f"{name}.weight" for name in ("rope_freqs", "rope_factors_long", "rope_factors_short")
)
ROPE_TENSORS = frozenset((FREQUENCY_FACTORS, LONG_FACTORS, SHORT_FACTORS))
OUTPUT = "output.weight"

_SIZES = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class GgufHeader:
    """What a file says of its model, by the names of its architecture, and its small tensors."""

    def __init__(self, reader: Any) -> None:
        self._fields: Mapping[str, Any] = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.architecture = str(self._fields["general.architecture"].contents())

    def said(self, key: str) -> Any:
        """None where it says nothing of `key`."""
        field = self._fields.get(f"{self.architecture}.{key}")
        return None if field is None else field.contents()

    def factors(self, name: str) -> list[float] | None:
        """The float32 tensor `name`; None where there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else [float(factor) for factor in tensor.data]

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._tensors


def complete_config(header: GgufHeader, read: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a config.json: those that transformers' reader `read`, and what else the file says.

    Raises CheckpointError where its positions are scaled in a way that is unknown here.
    """
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {**read, "tie_word_embeddings": OUTPUT not in header}
    defaults = CONFIG_MAPPING[values["model_type"]]()
    mapping: Any = GGUF_CONFIG_MAPPING
    known = mapping.get(header.architecture, {})
    for key, name in _SIZES.items():
        if hasattr(defaults, name) and key not in known and (size := header.said(key)) is not None:
            values.setdefault(name, size)
    if "n_ctx" in values:  # GPT-2's older name
        values["n_positions"] = values.pop("n_ctx")
    for name in _TOKENS:  # a family's default may be beyond this vocabulary
        token = getattr(defaults, name, None)
        if isinstance(token, int) and token >= values.get("vocab_size", token + 1):
            values.setdefault(name, None)
    if hasattr(defaults, "rope_parameters"):
        values |= _positions(header, values, defaults)
    return values


def _positions(header: GgufHeader, values: Mapping[str, Any], defaults: Any) -> dict[str, Any]:
    """How heads are turned by their positions, where it is not as the family's defaults say."""
    found: dict[str, Any] = {}
    turned = header.said("rope.dimension_count")
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if turned is not None and (turned != head or (defaults.rope_parameters or {}).get("partial_rotary_factor")):
        found["partial_rotary_factor"] = turned / head
    scaling = _scaling(header)
    if scaling is not None:
        found["rope_scaling"] = scaling
        if hasattr(defaults, "original_max_position_embeddings"):  # Phi-3's own place for it, which counts there
            found["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return found


def _scaling(header: GgufHeader) -> dict[str, Any] | None:
    """`rope_scaling` as transformers has it. Factors of all frequencies, of whatever making, are LongRoPE's with one list for long
    and for short."""
    kind, factor = header.said("rope.scaling.type"), header.said("rope.scaling.factor")
    original = header.said("rope.scaling.original_context_length") or header.said("context_length")
    factors = header.factors(FREQUENCY_FACTORS)
    long, short = header.factors(LONG_FACTORS), header.factors(SHORT_FACTORS)
    beside: dict[str, Any] = {"original_max_position_embeddings": original}
    if factors is not None:
        same = {"short_factor": factors, "long_factor": factors}
        return {"rope_type": "longrope", **same, "factor": 1.0, "attention_factor": 1.0, **beside}
    if long is not None and short is not None:
        attention = header.said("rope.scaling.attn_factor")
        if attention is not None:
            beside["attention_factor"] = attention
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **beside}
    if kind in (None, "none") or factor is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, **beside}
    raise CheckpointError(f"its positions are scaled by {kind}, which is not known here")


def find_gguf(path: Path) -> Path | None:
    """The GGUF file that is meant: this one, or the only one in a folder without safetensors. Raises CheckpointError where there
    are several, or it is one part of a model."""
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
    """A causal language model in a GGUF file. Raises CheckpointError where transformers cannot read it."""

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
            raise CheckpointError(f"{file}: not a GGUF file that transformers reads, or cut short: {error}") from error

    @property
    def plain_bytes(self) -> int:
        """How large the plain weights are."""
        return sum(int(tensor.n_elements) for tensor in self._reader.tensors) * DTYPE.itemsize

    @lean()
    def write(self, out: Path, progress: Progress | None = None) -> None:
        """Config, tokenizer and weights in bfloat16 into the empty folder `out`. Raises CheckpointError, OSError."""
        family = self._write_config(out)
        self._write_tokenizer(out)
        try:
            write_plain(self._all_tensors(family), out, self.plain_bytes, progress)
        except FOREIGN_ERRORS as error:
            raise CheckpointError(f"{self.file}: its tensors cannot be read: {error}") from error

    def _all_tensors(self, family: Family) -> Iterator[tuple[str, Tensor]]:
        """Those of the model. Raises CheckpointError where the file has others, or lacks some."""
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
        """The one beside the file, else the one within it, where there is one."""
        beside = [name for name in TOKENIZER_NAMES if (self.file.parent / name).is_file()]
        if has_tokenizer(beside):
            for name in beside:
                shutil.copyfile(self.file.parent / name, out / name)
        elif "tokenizer.ggml.tokens" in self._reader.fields:
            from transformers import AutoTokenizer

            auto: Any = AutoTokenizer
            try:
                tokenizer = auto.from_pretrained(str(self.file.parent), gguf_file=self.file.name, local_files_only=True)
                tokenizer.save_pretrained(out)
            except (*FOREIGN_ERRORS, OSError) as error:
                raise CheckpointError(
                    f"{self.file}: its tokenizer cannot be read ({error}): put the model's tokenizer.json beside it"
                ) from error

    def _tensors(self, model: Any) -> Iterator[tuple[str, Tensor]]:
        """Of the file, by their names in a model that has no weights."""
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
            if tensor.name in ROPE_TENSORS:  # the config has them
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


def _shapes(family: Family, model: Any) -> dict[str, torch.Size]:
    """Of all tensors that the model has, tied ones once."""
    return {
        name: tensor.shape
        for name, tensor in model.state_dict().items()
        if name not in (model.all_tied_weights_keys if family.tied else ())
    }
