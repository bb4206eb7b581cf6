"""Gathers the trained tensors of all blocks into one checkpoint, as `save_pretrained` would write it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swarmnode.compute.model.checkpoint import CONFIG_FILE, INDEX_FILE, Checkpoint, load_config
from swarmnode.compute.model.lean import lean
from swarmnode.compute.model.tensor_file import ShardWriter
from swarmnode.compute.training.block import EMA
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json
from swarmnode.swarm.storage.content import SMALL_NAMES, TOKENIZER_NAMES

SHARD_BYTES = 5_000_000_000
PARTS = ("parameter/", "buffer/", f"{EMA}/")  # of a block's state; the last take the place of the first


def gather(files: Iterable[Path], *, average: bool = True) -> dict[str, Tensor]:
    """Return parameters and buffers in the states of blocks, by their names in the state dict, mapped from the files.

    With `average`, a parameter's exponential moving average takes its place if the run keeps one. Raises CheckpointError if a file
    cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt")
            for part in PARTS if average else PARTS[:-1]:
                for key in file.keys():  # noqa: SIM118  (no mapping)
                    if key.startswith(part):
                        tensors[key.removeprefix(part)] = file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as a training state: {error}; fetch it again") from error
    return tensors


def write_language_model(tensors: Mapping[str, Tensor], small_files: Path, out: Path) -> None:
    """Write the files that `from_pretrained` reads into the empty folder `out`; `small_files` has config and tokenizer.

    Raises CheckpointError if the tensors are not those of the model, OSError.
    """
    check_names(tensors, small_files)
    for name in SMALL_NAMES - {INDEX_FILE}:
        if (small_files / name).is_file():
            shutil.copyfile(small_files / name, out / name)
    values = parse_json((small_files / CONFIG_FILE).read_bytes())
    values.pop("torch_dtype", None)  # the older name of the next one
    values["dtype"] = "float32"  # training is in float32
    (out / CONFIG_FILE).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    write_shards(tensors, out)


def write_module(tensors: Mapping[str, Tensor], founded: Path, out: Path) -> None:
    """Write the files that `load_state_dict` takes: trained tensors, and the others as the swarm was founded with them.

    `founded` is the folder of the founded checkpoint. A tensor that the module has under two names is written once, and constants
    of its code are written, too, so load with `strict=False`. For a language model, config and tokenizer are written as well.
    Raises CheckpointError if the states hold an unknown tensor.
    """
    checkpoint = Checkpoint(founded)
    unknown = sorted(tensors.keys() - checkpoint.entries.keys())
    if unknown:
        raise CheckpointError(
            f"the states hold {unknown[0]}, which the swarm's module does not have: they belong to another swarm"
        )
    for name in sorted({CONFIG_FILE, *TOKENIZER_NAMES}):
        if (founded / name).is_file():
            shutil.copyfile(founded / name, out / name)
    write_shards({**checkpoint.read(checkpoint.tensor_names), **tensors}, out)


@lean()
def check_names(tensors: Mapping[str, Tensor], small_files: Path) -> None:
    """Raise CheckpointError unless these are all tensors of the model that the config describes, tied ones once."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(load_config(small_files / CONFIG_FILE))
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in model.all_tied_weights_keys}
    for name in sorted(expected.keys() ^ tensors.keys()):
        raise CheckpointError(
            f"the states {'lack' if name in expected else 'hold an unknown'} "
            f"tensor {name}: they belong to another model"
        )
    for name, tensor in expected.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"the states hold {name} of shape {tuple(tensors[name].shape)}, "
                f"not {tuple(tensor.shape)}: they belong to another model"
            )


def write_shards(tensors: Mapping[str, Tensor], out: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write model.safetensors, or shards of at most `shard_bytes` (or one tensor) with an index. Raises OSError."""
    writer = ShardWriter(out, shard_bytes)
    for name, tensor in sorted(tensors.items()):
        writer.add(name, tensor)
    writer.close()
