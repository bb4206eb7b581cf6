"""Layers beside a model that guess tokens: the model's own (MTP), and EAGLE heads. The last hop runs them.

EAGLE head: a layer that was trained beside a model to guess the states behind its final norm (arXiv 2401.15077, 2406.16858).

From the state of a position and the token drawn behind it, the head guesses the state of the next position:

    fc [embedding(token); norm(hidden)] -> a decoder layer without a norm before its attention -> the model's head

`norm` is the model's final norm. For further guesses the head's own states take the place of norm(hidden). A folder has the head's
config and the tensors `fc.*`, `layers.0.*` and mostly `embed_tokens.weight`. EAGLE-2 has the same head, and other trees of guesses.

The model's own layer for guesses: multi-token prediction (MTP) as in DeepSeek-V3 (arXiv 2412.19437, section 2.2) and GLM-4.5.

From the hidden state of a position and the token drawn behind it, the layer guesses the token after that one:

    eh_proj [enorm(embedding(token)); hnorm(norm(hidden))] -> a decoder layer of the family -> its own norm -> the model's head

`norm` is the model's final norm. Checkpoints keep the layer under the number after the last one. transformers' classes leave its
weights out, so the decoder layer is built as a model of the family that has this one layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from swarmnode.compute.model.assemble import assemble, outline
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.family import family_of
from swarmnode.compute.model.quantised_weights import plain_slices
from swarmnode.compute.model.span import ModelSpan
from swarmnode.errors import CheckpointError


class GuessingLayer(ABC):
    """Decoder layer with an embedding and a projection before it, and the model's head behind it, on the device of that head.

    Only `move_to` and `close` may be used from another thread than the device's.

    Args:
        main: Span with the model's head and final norm, which the layer uses, too.
        block: The decoder layer, as a span of a model with one layer.
        ends: The layer's other modules; "post_norm" stands before the model's head.
    """

    def __init__(self, main: ModelSpan, block: ModelSpan, ends: nn.ModuleDict) -> None:
        self.block = block
        self._main = main
        self._ends = ends

    @property
    def weight_bytes(self) -> int:
        """Bytes of the layer's own weights."""
        return self.block.weight_bytes + sum(int(parameter.nbytes) for parameter in self._ends.parameters())

    def move_to(self, device: torch.device) -> None:
        """Move the weights to another device."""
        self.block.move_to(device)
        self._ends.to(device)

    def close(self) -> None:
        """Free the memory of the weights. The layer cannot run afterwards."""
        self.block.close()
        for module in self._ends.values():
            module._parameters.clear()

    @abstractmethod
    def take(self, left_RTH: Tensor) -> Tensor:
        """Return states (R, T, H) that left the model's last layer in the form of the layer's own states."""

    @abstractmethod
    def enter(self, hidden_RTH: Tensor, ids_RT: Tensor) -> Tensor:
        """Return the inputs (R, T, H) of the decoder layer.

        Args:
            hidden_RTH: States that left the decoder layer, or states from `take`.
            ids_RT: Token behind each position (int64).
        """

    def guess(self, hidden_RH: Tensor) -> Tensor:
        """Return the most likely ids_R (int64) after positions whose hidden_RH left the decoder layer."""
        logits_RV: Tensor = self._main.model.get_output_embeddings()(self._ends["post_norm"](hidden_RH))
        return logits_RV.argmax(-1)


def embedding_of(checkpoint: Checkpoint) -> str | None:
    """Return the name of the token embedding in a checkpoint; None if it has none."""
    end = f".{checkpoint.family.input_embedding}.weight"
    return next((name for name in checkpoint.entries if f".{name}".endswith(end)), None)


def linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> nn.Linear:
    """Return a frozen linear module with these weights."""
    module = nn.Linear(weight_OI.shape[1], weight_OI.shape[0], bias=bias_O is not None, device="meta")
    module.weight = nn.Parameter(weight_OI, requires_grad=False)
    if bias_O is not None:
        module.bias = nn.Parameter(bias_O, requires_grad=False)
    return module


LAYER_EMBEDDING, POST_NORM, PROJECTION = "embed_tokens.weight", "shared_head.norm.weight", "eh_proj.weight"
ENDS = (LAYER_EMBEDDING, "enorm.weight", "hnorm.weight", PROJECTION, POST_NORM)
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
    if LAYER_EMBEDDING not in own and embedding is not None:
        own[LAYER_EMBEDDING] = embedding
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


def load_mtp(checkpoint: Checkpoint, main: ModelSpan) -> MtpLayer:
    """Load a checkpoint's MTP layer beside the span with its head, in the span's dtype. Quantised weights are dequantised.

    Raises CheckpointError if the checkpoint has none, or the layer is damaged.
    """
    names = mtp_tensors(checkpoint)
    if not names or not hasattr(main.model.base_model, "norm"):
        raise CheckpointError("the checkpoint has no prediction layer (MTP) in a known form")
    stored = _read(checkpoint, names)
    try:
        config = checkpoint.family.config.get_mtp_config()
    except ValueError as error:
        raise CheckpointError(f"its prediction layer (MTP) cannot be built: {error}") from error
    config.num_hidden_layers = 1
    family = family_of(config)
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
    return {
        LAYER_EMBEDDING if name == names[LAYER_EMBEDDING] else name.removeprefix(prefix): each
        for name, each in slices.items()
    }


def _ends(tensors: Mapping[str, Tensor], main: ModelSpan) -> nn.ModuleDict:
    """Return the modules around the decoder layer. Norms are like the model's final one. Raises CheckpointError if a shape is
    wrong."""
    width, vocabulary = main.hidden_size, main.vocab_size
    shapes = dict.fromkeys(ENDS, (width,)) | {LAYER_EMBEDDING: (vocabulary, width), PROJECTION: (width, 2 * width)}
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
        "embedding": nn.Embedding.from_pretrained(tensors[LAYER_EMBEDDING]),
        "enorm": norm("enorm.weight"),
        "hnorm": norm("hnorm.weight"),
        "projection": linear(tensors[PROJECTION]),
        "post_norm": norm(POST_NORM),
    }
    return nn.ModuleDict(modules).requires_grad_(False)


EMBEDDING, FUSION, BIAS = "embed_tokens.weight", "fc.weight", "fc.bias"
LAYER, NORM = "layers.0.", "input_layernorm"
EAGLE_3 = ("d2t", "t2d", "midlayer.")  # beginnings of names


class EagleHead(GuessingLayer):
    """EAGLE head of a model."""

    def take(self, left_RTH: Tensor) -> Tensor:
        """Return the states behind the model's final norm."""
        normal_RTH: Tensor = self._main.model.base_model.norm(left_RTH)
        return normal_RTH

    def enter(self, hidden_RTH: Tensor, ids_RT: Tensor) -> Tensor:
        """Return the inputs (R, T, H) of the decoder layer; see `GuessingLayer.enter`."""
        embedded_RTH = self._ends["embedding"](ids_RT.to(self.block.device))
        inputs_RTH: Tensor = self._ends["fusion"](torch.cat([embedded_RTH, hidden_RTH], dim=-1))
        return inputs_RTH


def is_eagle(checkpoint: Checkpoint) -> bool:
    """Return whether a folder holds a head of EAGLE, EAGLE-2 or EAGLE-3."""
    return FUSION in checkpoint.entries


def check_eagle(head: Checkpoint, served: Checkpoint) -> None:
    """Raise CheckpointError, naming the reason, if this version cannot use the head with the served model."""
    if any(name.startswith(EAGLE_3) for name in head.entries):
        raise CheckpointError(
            f"{head.path}: an EAGLE-3 head reads the states of three layers, and the machine with the last layer has only "
            "those of its own: use a head of EAGLE or EAGLE-2"
        )
    if head.quantised is not None or head.packed_file is not None:
        raise CheckpointError(f"{head.path}: the weights of this EAGLE head are quantised: use the plain ones")
    if head.family.layer_count != 1:
        raise CheckpointError(
            f"{head.path}: an EAGLE head of {head.family.layer_count} layers: only those of one are known"
        )
    wanted = _shapes(head, int(served.config.hidden_size))
    for name, entry in head.entries.items():
        if tuple(entry.shape) != wanted.get(name):
            fits = (
                f"not {wanted[name]}, as for this model"
                if name in wanted
                else "and no known EAGLE head has that tensor"
            )
            raise CheckpointError(f"{head.path}: {name} has the shape {tuple(entry.shape)}, {fits}")
    lacking = sorted(wanted.keys() - head.entries.keys() - {BIAS, EMBEDDING})
    if lacking:
        raise CheckpointError(f"{head.path}: this EAGLE head lacks {lacking[0]}: fetch it again")


def borrowed_tensors(head: Checkpoint, served: Checkpoint) -> list[str]:
    """Return the names of the served model's tensors that the head needs: the embedding, unless the head has its own."""
    embedding = embedding_of(served)
    return [] if EMBEDDING in head.entries or embedding is None else [embedding]


def eagle_bytes(head: Checkpoint, served: Checkpoint, dtype: torch.dtype) -> int:
    """Return the bytes that the head takes in `dtype`, with what it borrows."""
    borrowed = sum(served.entries[name].elements for name in borrowed_tensors(head, served))
    return (borrowed + sum(entry.elements for entry in head.entries.values())) * dtype.itemsize


def load_eagle(head: Checkpoint, served: Checkpoint, main: ModelSpan) -> EagleHead:
    """Load a head beside the span with the served model's head, in the span's dtype. Raises CheckpointError if it does not fit."""
    if not hasattr(main.model.base_model, "norm"):
        raise CheckpointError(f"{head.path}: the served model has no final norm in a known place")
    stored = head.read(head.entries)
    for tensor in served.read(borrowed_tensors(head, served)).values():
        stored[EMBEDDING] = tensor
    family, stack = head.family, head.family.stack_name
    layer = {f"{stack}.0.{name.removeprefix(LAYER)}": stored[name] for name in stored if name.startswith(LAYER)}
    layer[f"{stack}.0.{NORM}.weight"] = torch.ones(main.hidden_size)
    block = assemble(family, layer, 1, 2, dtype=main.dtype)
    block.get_submodule(f"{stack}.0").register_module(NORM, nn.Identity())
    block.to(main.device)
    tensors = {name: stored[name].to(main.dtype) for name in (EMBEDDING, FUSION, BIAS) if name in stored}
    ends = nn.ModuleDict(
        {
            "embedding": nn.Embedding.from_pretrained(tensors[EMBEDDING]),
            "fusion": linear(tensors[FUSION], tensors.get(BIAS)),
            "post_norm": nn.Identity(),
        }
    )
    return EagleHead(main, ModelSpan(family, block, 1, 2), ends.to(main.device))


def _shapes(head: Checkpoint, width: int) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a head of this family may have, beside a model of `width`."""
    family = head.family
    layer = outline(family, 1, 2, dtype=torch.float32).get_submodule(f"{family.stack_name}.0").state_dict()
    shapes = {f"{LAYER}{name}": tuple(tensor.shape) for name, tensor in layer.items()}
    if shapes.pop(f"{LAYER}{NORM}.weight", None) != (width,):
        raise CheckpointError(f"{head.path}: an EAGLE head of the family {head.config.model_type} is not known here")
    return {**shapes, EMBEDDING: (head.config.vocab_size, width), FUSION: (width, 2 * width), BIAS: (width,)}
