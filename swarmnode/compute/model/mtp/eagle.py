"""EAGLE head: a layer that was trained beside a model to guess the states behind its final norm (arXiv 2401.15077, 2406.16858).

From the state of a position and the token drawn behind it, the head guesses the state of the next position:

    fc [embedding(token); norm(hidden)] -> a decoder layer without a norm before its attention -> the model's head

`norm` is the model's final norm. For further guesses the head's own states take the place of norm(hidden). A folder has the head's
config and the tensors `fc.*`, `layers.0.*` and mostly `embed_tokens.weight`. EAGLE-2 has the same head, and other trees of guesses.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from swarmnode.compute.model.assemble import assemble, outline
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.mtp.guessing_layer import GuessingLayer, embedding_of, linear
from swarmnode.compute.model.span import ModelSpan
from swarmnode.errors import CheckpointError

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

    def guess(self, hidden_RH: Tensor) -> Tensor:
        """Return the most likely ids_R (int64) after positions whose hidden_RH left the decoder layer."""
        logits_RV: Tensor = self._main.model.get_output_embeddings()(hidden_RH)
        return logits_RV.argmax(-1)


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
