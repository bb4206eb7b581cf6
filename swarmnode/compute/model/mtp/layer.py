"""The model's own layer for guesses: multi-token prediction (MTP) as in DeepSeek-V3 (arXiv 2412.19437, section 2.2) and GLM-4.5.

From the hidden state of a position and the token drawn behind it, the layer guesses the token after that one:

    eh_proj [enorm(embedding(token)); hnorm(norm(hidden))] -> a decoder layer of the family -> its own norm -> the model's head

`norm` is the model's final norm. Checkpoints keep the layer under the number after the last one. transformers' classes leave its
weights out, so the decoder layer is built as a model of the family that has this one layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.model.assemble import assemble
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import family_of
from swarmnode.compute.model.mtp.guessing_layer import GuessingLayer, embedding_of, linear
from swarmnode.compute.model.packing.quantised_folders.quantised_weights import plain_slices
from swarmnode.compute.model.span import ModelSpan
from swarmnode.errors import CheckpointError

EMBEDDING, POST_NORM, PROJECTION = "embed_tokens.weight", "shared_head.norm.weight", "eh_proj.weight"
ENDS = (EMBEDDING, "enorm.weight", "hnorm.weight", PROJECTION, POST_NORM)
SHARED_HEAD = "shared_head.head."  # a copy of the model's head


def mtp_tensors(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the names in the checkpoint of the first MTP layer's tensors, by their names within the layer.

    The result is empty if the checkpoint has no such layer, keeps it in another form, or is a GGUF file.
    """
    prefix = f"model.layers.{checkpoint.family.layer_count}."
    names = {name.removeprefix(prefix): name for name in checkpoint.entries if name.startswith(prefix)}
    if PROJECTION not in names or checkpoint.packed_file is not None:
        return {}
    own = {name: full for name, full in names.items() if not name.startswith(SHARED_HEAD)}
    embedding = embedding_of(checkpoint)
    if EMBEDDING not in own and embedding is not None:
        own[EMBEDDING] = embedding
    return own if own.keys() >= set(ENDS) else {}


def mtp_bytes(checkpoint: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the MTP layer takes in `dtype`; 0 without one."""
    return sum(checkpoint.entries[name].elements for name in mtp_tensors(checkpoint).values()) * dtype.itemsize


class MtpLayer(GuessingLayer):
    """Multi-token prediction layer of a model."""

    def take(self, left_RTH: Tensor) -> Tensor:
        """Return the states themselves: `enter` normalises the model's states and the layer's own alike."""
        return left_RTH

    def enter(self, hidden_RTH: Tensor, ids_RT: Tensor) -> Tensor:
        """Return the inputs (R, T, H) of the decoder layer; see `GuessingLayer.enter`."""
        embedded_RTH = self._ends["enorm"](self._ends["embedding"](ids_RT.to(self.block.device)))
        normal_RTH = self._ends["hnorm"](self._main.model.base_model.norm(hidden_RTH))
        inputs_RTH: Tensor = self._ends["projection"](torch.cat([embedded_RTH, normal_RTH], dim=-1))
        return inputs_RTH

    def guess(self, hidden_RH: Tensor) -> Tensor:
        """Return the most likely ids_R (int64) after positions whose hidden_RH left the decoder layer."""
        logits_RV: Tensor = self._main.model.get_output_embeddings()(self._ends["post_norm"](hidden_RH))
        return logits_RV.argmax(-1)


def load_mtp(checkpoint: Checkpoint, main: ModelSpan) -> MtpLayer:
    """Load a checkpoint's MTP layer beside the span with its head, in the span's dtype. Quantised weights are dequantised.

    Raises CheckpointError if the checkpoint has none, or the layer is damaged.
    """
    names = mtp_tensors(checkpoint)
    if not names or not hasattr(main.model.base_model, "norm"):
        raise CheckpointError("the checkpoint has no prediction layer (MTP) in a known form")
    stored = _read(checkpoint, names)
    family = family_of(_config_of_one(checkpoint.family.config))
    layer = {f"model.layers.0.{name}": tensor for name, tensor in stored.items() if name not in ENDS}
    block = assemble(family, layer, 1, 2, dtype=main.dtype)
    block.to(main.device)
    ends = _ends({name: stored[name][...].to(main.dtype) for name in ENDS}, main)
    return MtpLayer(main, ModelSpan(family, block, 1, 2), ends.to(main.device))


def _read(checkpoint: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the layer's tensors as slices, by their names within the layer; quantised ones dequantised when read."""
    slices, quantised = checkpoint.read_slices(names.values()), checkpoint.quantised
    if quantised is not None:
        slices = plain_slices(quantised, slices, quantised.packed & slices.keys())
    prefix = f"model.layers.{checkpoint.family.layer_count}."
    return {EMBEDDING if name == names[EMBEDDING] else name.removeprefix(prefix): each for name, each in slices.items()}


def _config_of_one(config: Any) -> Any:
    """Return the config of a model whose only layer is the MTP layer. Raises CheckpointError if the family has none."""
    try:
        one = config.get_mtp_config()
    except ValueError as error:
        raise CheckpointError(f"its prediction layer (MTP) cannot be built: {error}") from error
    one.num_hidden_layers = 1
    return one


def _ends(tensors: Mapping[str, Tensor], main: ModelSpan) -> nn.ModuleDict:
    """Return the modules around the decoder layer. Norms are like the model's final one. Raises CheckpointError if a shape is
    wrong."""
    width, vocabulary = main.hidden_size, main.vocab_size
    shapes = dict.fromkeys(ENDS, (width,)) | {EMBEDDING: (vocabulary, width), PROJECTION: (width, 2 * width)}
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"the prediction layer's {name} has the shape {tuple(tensors[name].shape)}, not {shape}; fetch it again"
            )

    def norm(name: str) -> nn.Module:
        module: nn.Module = deepcopy(main.model.base_model.norm)
        module.load_state_dict({"weight": tensors[name]})
        return module

    modules = {
        "embedding": nn.Embedding.from_pretrained(tensors[EMBEDDING]),
        "enorm": norm("enorm.weight"),
        "hnorm": norm("hnorm.weight"),
        "projection": linear(tensors[PROJECTION]),
        "post_norm": norm(POST_NORM),
    }
    return nn.ModuleDict(modules).requires_grad_(False)
