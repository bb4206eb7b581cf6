"""Encoders: transformers models that turn a row of token ids into one vector, by pooling or as a classifier.

The pooling is read from the files of sentence-transformers beside the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    AutoModel,
    AutoModelForSequenceClassification,
)

from swarmnode.compute.model.assemble import quiet_loader
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.hub import HubCheckpoint
from swarmnode.compute.model.traced_model import FOREIGN_ERRORS
from swarmnode.errors import CheckpointError
from swarmnode.files import parse_json

GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
IDS, EMBEDDING, PROBABILITIES = "input_ids", "embedding", "probs"
CLASSIFIER = "ForSequenceClassification"
MODULES_FILE = "modules.json"
POOLING_FILE = "1_Pooling/config.json"
LENGTH_FILE = "sentence_bert_config.json"
CLS, MEAN, MAX, LAST = "cls_token", "mean_tokens", "max_tokens", "lasttoken"
MODES = (CLS, MEAN, MAX, LAST)

SmallFile = Callable[[str], Path | None]
"""Function that returns the path of a checkpoint's small file by its name; None if there is none"""


@dataclass(frozen=True)
class Pooling:
    """Pooling of hidden states into one vector. The default is the mean, scaled to length 1.

    `mode` is its name in sentence-transformers. `normalize` scales the vector to length 1. `positions` is the checkpoint's own
    limit of tokens; None if it sets none.
    """

    mode: str = MEAN
    normalize: bool = True
    positions: int | None = None

    def __call__(self, hidden_TH: Tensor) -> Tensor:
        """Return the vector pooled_H of a text's hidden states."""
        pooled_H = {
            CLS: lambda: hidden_TH[0],
            MEAN: lambda: hidden_TH.mean(0),
            MAX: lambda: hidden_TH.amax(0),
            LAST: lambda: hidden_TH[-1],
        }[self.mode]()
        return torch.nn.functional.normalize(pooled_H, dim=0) if self.normalize else pooled_H


def read_pooling(file: SmallFile) -> Pooling:
    """Read the checkpoint's pooling; the default if it names none. Raises CheckpointError if it is damaged or not supported."""
    modules = _read(file, MODULES_FILE, list)
    if modules is None:
        return Pooling()
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    if others or kinds[:2] != ["Transformer", "Pooling"]:
        raise CheckpointError(
            f"{MODULES_FILE} asks for {', '.join(others or kinds)}, which is not supported; choose another model"
        )
    settings = _read(file, POOLING_FILE, dict) or {}
    modes = [mode for mode in settings if mode.startswith("pooling_mode_") and settings[mode] is True]
    mode = modes[0].removeprefix("pooling_mode_") if modes else str(settings.get("pooling_mode", MEAN))
    if len(modes) > 1 or mode not in MODES:
        names = ", ".join(mode.removeprefix("pooling_mode_") for mode in modes) or mode
        raise CheckpointError(
            f"{POOLING_FILE} asks for {names}; supported is one of {', '.join(MODES)}; choose another model"
        )
    positions = (_read(file, LENGTH_FILE, dict) or {}).get("max_seq_length")
    return Pooling(mode, "Normalize" in kinds, positions if isinstance(positions, int) else None)


def _read(file: SmallFile, name: str, kind: type) -> Any:
    path = file(name)
    if path is None:
        return None
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; fetch it again") from None
    if not isinstance(content, kind):
        raise CheckpointError(f"{path} is not as sentence-transformers writes it; fetch it again")
    return content


class EmbeddingModel(nn.Module):
    """Model that returns the pooled vector of one text. Texts are not padded: `input_ids` holds one text alone."""

    def __init__(self, model: nn.Module, pooling: Pooling) -> None:
        super().__init__()
        self.model = model
        self.pooling = pooling

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the embedding vector embedding_H of one text's token ids input_ids_T."""
        hidden_BTH = self.model(input_ids=input_ids[None], use_cache=False).last_hidden_state
        return {EMBEDDING: self.pooling(hidden_BTH[0])}


class ClassificationModel(nn.Module):
    """Model that returns the probabilities of a text's classes."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        problem = model.config.problem_type
        self.independent = problem == "multi_label_classification" or (problem is None and model.config.num_labels == 1)
        self.is_score = problem == "regression"

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return probs_C of input_ids_T. A model trained for a regression returns its scores instead."""
        logits_C = self.model(input_ids=input_ids[None], use_cache=False).logits[0]
        if self.is_score:
            return {PROBABILITIES: logits_C}
        return {PROBABILITIES: logits_C.sigmoid() if self.independent else logits_C.softmax(-1)}


def task_of(config: Any, *, pools: bool = False) -> str:
    """Return a checkpoint's task by its config: GENERATE, EMBED or CLASSIFY. `pools`: it has files that define a pooling."""
    architecture = str((getattr(config, "architectures", None) or [""])[0])
    if architecture.endswith(CLASSIFIER):
        return CLASSIFY
    if pools:
        return EMBED
    is_encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not (
        getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    )
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, ())
    return EMBED if is_encoder and architecture not in ((causal,) if isinstance(causal, str) else causal) else GENERATE


def load_encoder(checkpoint: Checkpoint, task: str, pooling: Pooling) -> tuple[nn.Module, frozenset[str]]:
    """Load the whole model in float32, and the names of weights that the checkpoint lacks, in the returned model's state dict.

    The task's results must not depend on these weights. Raises CheckpointError if no model can be made.
    """
    if isinstance(checkpoint, HubCheckpoint):
        checkpoint.open_slices(checkpoint.tensor_names)  # fetches every shard, with a progress bar
    try:
        with quiet_loader():
            model, loading = _class_for(task).from_pretrained(
                checkpoint.path,
                config=checkpoint.config,
                dtype=torch.float32,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except (*FOREIGN_ERRORS, OSError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: no model can be made of it: {error}; choose another model"
        ) from error
    return _wrapped(model, task, pooling), frozenset(f"model.{name}" for name in loading["missing_keys"])


def outline_encoder(checkpoint: Checkpoint, task: str, pooling: Pooling) -> nn.Module:
    """Build the same model on the meta device, without weights. Raises CheckpointError if no model can be made."""
    try:
        with torch.device("meta"):
            model = _class_for(task).from_config(checkpoint.config, dtype=torch.float32)
    except FOREIGN_ERRORS as error:
        raise CheckpointError(
            f"{checkpoint.path}: no model can be made of it: {error}; choose another model"
        ) from error
    return _wrapped(model, task, pooling)


def _class_for(task: str) -> Any:
    return AutoModelForSequenceClassification if task == CLASSIFY else AutoModel


def _wrapped(model: Any, task: str, pooling: Pooling) -> nn.Module:
    return (ClassificationModel(model) if task == CLASSIFY else EmbeddingModel(model, pooling)).eval()


def positions_of(module: nn.Module, config: Any) -> int | None:
    """Return the most tokens of a text: the size of the model's position table; None if it has none (computed positions).

    Tables with a padding row begin to count behind that row (RoBERTa).
    """
    size = getattr(config, "max_position_embeddings", None)
    for name, table in module.named_modules():
        if isinstance(table, nn.Embedding) and table.num_embeddings == size and "position" in name:
            return int(size if table.padding_idx is None else size - table.padding_idx - 1)
    return None
