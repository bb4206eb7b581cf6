"""A swarm founded on an encoder: a checkpoint of transformers becomes a graph from a row of token ids to one vector."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swarmnode.compute.graph.boundary import check_travel
from swarmnode.compute.graph.exporting.export import export_module
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.graph import Graph, Ref
from swarmnode.compute.graph.layout import Layout
from swarmnode.compute.graph.partition import UNITS, partition
from swarmnode.compute.graph.segment import GraphSegment
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
from swarmnode.errors import CheckpointError
from swarmnode.swarm.records.manifest import ModelInfo
from swarmnode.swarm.storage.content import CONFIG_NAME, TOKENIZER_NAMES
from swarmnode.swarm.storage.small_files import new_folder

EXAMPLE_TOKENS = 11
TRIED_TOKENS = (3, 17)
MOST_TRIED_TOKENS = 512
TOLERANCE = 1e-4


def write_encoder(checkpoint: Checkpoint, task: str, out: Path, *, force: bool = False) -> ModelInfo:
    """Write it as a graph into the folder `out`, with config and tokenizer. Raises CheckpointError, UsageError where it cannot be
    a graph, with operator and line."""
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
    """The graph that `write_encoder` would write, by the config alone. Raises CheckpointError, UsageError."""
    config, pooling = checkpoint.config, _pooling(checkpoint, task)
    module = outline_encoder(checkpoint, task, pooling)
    return _cut(_export(module, config, _positions(module, config, pooling)).graph, config)


def _pooling(checkpoint: Checkpoint, task: str) -> Pooling:
    return read_pooling(checkpoint.small_file) if task == EMBED else Pooling()


def _positions(module: nn.Module, config: Any, pooling: Pooling) -> int:
    """How many tokens a text may have; 0 is no bound."""
    return min((size for size in (positions_of(module, config), pooling.positions) if size), default=0)


def _cut(graph: Graph, config: Any) -> Graph:
    """Into about as many units as there are layers, and two ends."""
    layers = getattr(config, "num_hidden_layers", None)
    return partition(graph, layers + 2 if isinstance(layers, int) else UNITS).graph


def _export(module: nn.Module, config: Any, positions: int) -> Exported:
    """For rows of any length: the tokens of a text are the batch of its graph."""
    exported = export_module(
        module, {IDS: _ids(config, min(EXAMPLE_TOKENS, positions or EXAMPLE_TOKENS))}, trains=False
    )
    if not exported.graph.any_batch:
        raise CheckpointError(f"{config.model_type} cannot be served: its graph is good for texts of one length only")
    return exported


def _used(graph: Graph, exported: Exported, missing: frozenset[str]) -> dict[str, torch.Tensor]:
    """The weights without those that nothing reads, as a pooler that was never trained. Raises CheckpointError where one that
    the checkpoint lacks is read."""
    read = {ref for node in graph.nodes for ref in node.refs()}
    used = {weight.tensor: exported.weights[weight.tensor] for weight in graph.weights if Ref(weight.name) in read}
    lacking = sorted(missing & used.keys())
    if lacking:
        raise CheckpointError(
            f"the checkpoint lacks {lacking[0].removeprefix('model.')}: it was not trained for this task"
        )
    return used


def _try(module: nn.Module, segment: GraphSegment, config: Any, positions: int) -> None:
    """Raises CheckpointError where the graph gives something else than the model, at other lengths than it was exported with."""
    lengths = {min(count, positions or count) for count in (*TRIED_TOKENS, min(positions, MOST_TRIED_TOKENS) or 1)}
    for length in sorted(lengths):
        ids_T = _ids(config, length)
        with torch.inference_mode():
            (wanted,) = module(ids_T).values()
            (given,) = segment.forward((ids_T,), 0, segment.units, 0)
        error = float((wanted - given).abs().max())
        if not error <= TOLERANCE:
            raise CheckpointError(
                f"{config.model_type} cannot be served: on {length} tokens its graph differs from the model by {error:.1e}"
            )


def _ids(config: Any, length: int) -> torch.Tensor:
    """A row of ids that are no special ones, as far as the vocabulary goes."""
    vocabulary = int(config.vocab_size)
    return torch.arange(length) % max(1, vocabulary // 2) + vocabulary // 3
