"""Training of a language model that cannot be split at its layers, as a graph from a row of tokens to its loss.

Serving needs a KV cache, and recurrent layers (Mamba, Qwen3-Next, LFM2, Falcon-H1) need another state; training keeps no
state between passes. A loss over the router logits of all layers belongs to no single layer.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from swarmnode.compute.graph.exporting.export import export_module
from swarmnode.compute.graph.exporting.gradient_check import check_gradients
from swarmnode.compute.graph.exporting.reader import Exported
from swarmnode.compute.graph.partition import partition
from swarmnode.compute.graph.serialise import write_graph
from swarmnode.compute.model.fresh import fresh_model

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
