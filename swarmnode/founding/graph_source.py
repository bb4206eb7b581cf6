"""Training of a language model that cannot be split at its layers, as a graph from a row of tokens to its loss.

Serving needs a KV cache, and recurrent layers (Mamba, Qwen3-Next, LFM2, Falcon-H1) need another state; training keeps no
state between passes. A loss over the router logits of all layers belongs to no single layer.

Founding a swarm on an encoder: a transformers checkpoint becomes a graph from a row of token ids to one vector.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmnode.compute.graph.boundary import Layout, check_travel
from swarmnode.compute.graph.exporting.gradient_check import check_gradients
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph import Graph, Ref
from swarmnode.compute.graph.graph_segment import GraphSegment
from swarmnode.compute.graph.partition import UNITS, partition
from swarmnode.compute.graph.serialise import write_graph
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.compute.model.encoder import (
    EMBED,
    IDS,
    Pooling,
    load_encoder,
    outline_encoder,
    positions_of,
    read_pooling,
)
from swarmnode.compute.model.fresh import fresh_model
from swarmnode.errors import CheckpointError
from swarmnode.swarm.records.manifest import ModelInfo
from swarmnode.swarm.storage.content import CONFIG_NAME, TOKENIZER_NAMES
from swarmnode.swarm.storage.small_files import new_folder

EXAMPLE_TOKENS = 11
TRIED_TOKENS = (3, 17)
MOST_TRIED_TOKENS = 512
TOLERANCE = 1e-4


def write_encoder(checkpoint: Checkpoint, task: str, out: Path, *, force: bool = False) -> ModelInfo:
    """Export the checkpoint for `task` as a graph, check it, and write it with config and tokenizer into the folder `out`.

    Returns the model's description for the manifest. Raises CheckpointError if the checkpoint does not fit the task or its
    graph gives other results, UsageError with operator and line if it cannot be exported.
    """
    config, pooling = checkpoint.config, _pooling(checkpoint, task)
    module, missing = load_encoder(checkpoint, task, pooling)
    positions = _positions(module, config, pooling)
    exported = _export(module, config, positions)
    graph = _cut(exported.graph, config)
    weights = _used(graph, exported, missing)
    check_travel(Layout(graph))
    _try(module, GraphSegment(graph, weights, 0, graph.units), config, positions)
    with new_folder(out, force=force) as partial:
        write_graph(Exported(graph, weights), partial)
        for name in (CONFIG_NAME, *sorted(TOKENIZER_NAMES)):
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, partial / name)
    return ModelInfo(family=config.model_type, units=graph.units, hidden=0, positions=positions, task=task)


def outline(checkpoint: Checkpoint, task: str) -> Graph:
    """Return the graph that `write_encoder` would write, from the config alone. Raises CheckpointError or UsageError if
    there is none."""
    config, pooling = checkpoint.config, _pooling(checkpoint, task)
    module = outline_encoder(checkpoint, task, pooling)
    return _cut(_export(module, config, _positions(module, config, pooling)).graph, config)


def _pooling(checkpoint: Checkpoint, task: str) -> Pooling:
    return read_pooling(checkpoint.small_file) if task == EMBED else Pooling()


def _positions(module: nn.Module, config: Any, pooling: Pooling) -> int:
    """Return the largest number of tokens of a text; 0 if it is unbounded."""
    return min((size for size in (positions_of(module, config), pooling.positions) if size), default=0)


def _cut(graph: Graph, config: Any) -> Graph:
    """Cut the graph into about one unit for each layer, and two for the ends."""
    layers = getattr(config, "num_hidden_layers", None)
    return partition(graph, layers + 2 if isinstance(layers, int) else UNITS).graph


def _export(module: nn.Module, config: Any, positions: int) -> Exported:
    """Export the module for rows of any length: a text's tokens are the graph's batch. Raises CheckpointError if only one
    length works."""
    exported = export_module(
        module, {IDS: _ids(config, min(EXAMPLE_TOKENS, positions or EXAMPLE_TOKENS))}, trains=False
    )
    if not exported.graph.any_batch:
        raise CheckpointError(
            f"{config.model_type} cannot be served: its graph is "
            "good for texts of one length only; choose another model"
        )
    return exported


def _used(graph: Graph, exported: Exported, missing: frozenset[str]) -> dict[str, torch.Tensor]:
    """Return the weights that the graph reads, without unused ones (such as an untrained pooler).

    Raises CheckpointError if the graph reads a weight that the checkpoint lacks.
    """
    read = {ref for node in graph.nodes for ref in node.refs()}
    used = {weight.tensor: exported.weights[weight.tensor] for weight in graph.weights if Ref(weight.name) in read}
    lacking = sorted(missing & used.keys())
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks {lacking[0].removeprefix('model.')}: it was not trained for this task"
        )
    return used


def _try(module: nn.Module, segment: GraphSegment, config: Any, positions: int) -> None:
    """Compare the graph with the model at several lengths. Raises CheckpointError if the results differ."""
    lengths = {min(count, positions or count) for count in (*TRIED_TOKENS, min(positions, MOST_TRIED_TOKENS) or 1)}
    for length in sorted(lengths):
        ids_T = _ids(config, length)
        with torch.inference_mode():
            (wanted,) = module(ids_T).values()
            (given,) = segment.forward((ids_T,), 0, segment.units, 0)
        error = float((wanted - given).abs().max())
        if not error <= TOLERANCE:
            raise CheckpointError(
                f"{config.model_type} cannot be served: for {length} tokens its "
                f"graph differs from the model by {error:.1e}; choose another model"
            )


def _ids(config: Any, length: int) -> torch.Tensor:
    """Return a row of token ids from the middle of the vocabulary, to avoid special tokens."""
    vocabulary = int(config.vocab_size)
    return torch.arange(length) % max(1, vocabulary // 2) + vocabulary // 3


TOKENS = 128  # of a sample: a graph has a fixed length
SAMPLES = 2


def write_language_graph(config: Any, folder: Path, seed: int) -> Exported:
    """Write the graph and fresh weights of the model of a transformers config into `folder`, and return them with remarks
    for the founder.

    Samples have `TOKENS` tokens, or the model's position limit if that is smaller. Raises UsageError if the model cannot be
    exported, CheckpointError if no model can be built from the config.
    """
    config.use_cache = False
    model = fresh_model(config, seed).train()
    length = min(TOKENS, getattr(config, "max_position_embeddings", None) or TOKENS)
    ids_BT = torch.arange(SAMPLES * length).view(SAMPLES, length) % int(config.vocab_size)
    example = {"input_ids": ids_BT, "labels": ids_BT}
    exported = export_module(model, example)
    remarks = check_gradients(model, (), example, exported)
    cut = partition(exported.graph, int(config.num_hidden_layers) + 2)
    made = replace(exported, graph=cut.graph, remarks=(*remarks, *cut.remarks, f"samples have {length} tokens"))
    write_graph(made, folder)
    return made
