"""Draft model of a volunteer: a small language model with the swarm's vocabulary, or a layer beside the model's head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swarmnode.compute.gguf.gguf import SUFFIX
from swarmnode.compute.graph.serialise import GraphCheckpoint
from swarmnode.compute.model.assemble import check_tensors
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.mtp import (
    GuessingLayer,
    borrowed_tensors,
    check_eagle,
    is_eagle,
    load_eagle,
    load_mtp,
    mtp_tensors,
)
from swarmnode.compute.model.span import ModelSpan
from swarmnode.compute.packing.tensor_entry import read_json
from swarmnode.errors import UsageError
from swarmnode.founding.model_source import open_model
from swarmnode.swarm.records.announcement import MAX_DRAFT_MODEL_CHARS

CACHE_TOKENS = 8_192  # positions of all drafting sessions together
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class DraftPart:
    """Draft model of a node, not loaded yet.

    Args:
        name: Name that the node announces.
        checkpoint: The model's files.
        dtype: Dtype to compute in.
        products: Kind of products of packed weights.
        weight_bytes: Memory that the weights take.
        cache_bytes: Memory that the KV caches of all sessions may take.
    """

    name: str
    checkpoint: Checkpoint
    dtype: torch.dtype
    products: str
    weight_bytes: int
    cache_bytes: int

    @property
    def need_bytes(self) -> int:
        """Memory that is set aside for the model."""
        return self.weight_bytes + self.cache_bytes


@dataclass(frozen=True)
class HeadPart:
    """Layer that guesses beside the model's head, not loaded yet.

    Args:
        eagle: Folder of an EAGLE head; None if the served model's own prediction layer (MTP) guesses.
        need_bytes: Memory that is set aside for its weights and caches.
    """

    eagle: Checkpoint | None
    need_bytes: int

    def tensors(self, served: Checkpoint) -> list[str]:
        """Return the names of the served model's tensors that the layer needs."""
        return list(mtp_tensors(served).values()) if self.eagle is None else borrowed_tensors(self.eagle, served)

    def load(self, served: Checkpoint, main: ModelSpan) -> GuessingLayer:
        """Load the layer beside the span with the served model's head. Raises CheckpointError if it does not fit."""
        return load_mtp(served, main) if self.eagle is None else load_eagle(self.eagle, served, main)


def draft_name(model: str) -> str:
    """Return the name of a draft model: the last part of its path or hub id, without the suffix of GGUF files, at most
    MAX_DRAFT_MODEL_CHARS printable characters."""
    name = Path(model.partition("@")[0]).name.removesuffix(SUFFIX)
    return "".join(filter(str.isprintable, name))[:MAX_DRAFT_MODEL_CHARS]


def open_draft(model: str, folder: Path, served: Checkpoint) -> Checkpoint:
    """Open a draft model or an EAGLE head: a folder, a GGUF file, or a hub id. `folder` gets the index of a GGUF file.

    Raises UsageError if its vocabulary is not the one of the `served` model, CheckpointError if it cannot be read or split, or
    has tensors that nothing would use.
    """
    if isinstance(served, GraphCheckpoint):
        raise UsageError("--draft-model: this swarm serves a module, which writes no text: leave the option out")
    draft = open_model(model, folder, packs=True, force=True)
    own, other = getattr(draft.config, "vocab_size", 0), served.config.vocab_size
    if own != other:
        raise UsageError(
            f"--draft-model {model}: its vocabulary has {own:,} tokens, and that of the swarm's model has {other:,}: "
            "choose a smaller model of the same family"
        )
    vocabularies = _vocabulary(draft), _vocabulary(served)
    if None not in vocabularies and vocabularies[0] != vocabularies[1]:
        raise UsageError(
            f"--draft-model {model}: its tokens are not those of the swarm's model: choose a model with its tokenizer"
        )
    if is_eagle(draft):
        check_eagle(draft, served)
    else:
        check_tensors(draft)
    return draft


def _vocabulary(checkpoint: Checkpoint) -> Any:
    """Return the ids by token of a checkpoint's tokenizer.json; None if it has no such file."""
    file = checkpoint.small_file(TOKENIZER_FILE)
    return None if file is None else read_json(file).get("model", {}).get("vocab")
