"""Recurrent language models by config: founded as graphs, trained on text as in plain transformers, and exported for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from swarmnode.client.training.preparation import prepare
from swarmnode.compute.graph.graph_segment import load_segment
from swarmnode.compute.training.local import train_locally
from swarmnode.compute.training.snapshot import write_module
from swarmnode.errors import UsageError
from swarmnode.founding.model_source import from_config
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
from swarmnode.swarm.records.manifest import GRAPH, TRAIN
from swarmnode.swarm.records.run import Run

LENGTH, STEPS = 8, 2
COMMON: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": LENGTH, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "qwen3_next": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"block_multiple_of": 8, "full_attn_idxs": [1]},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    "falcon_h1": {
        "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_chunk_size": 4,
    },
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recurrent_family_trains_by_config_as_in_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarmnode.founding.graph_source.TOKENS", LENGTH)
    CONFIG_MAPPING[family](**COMMON, **FAMILIES[family]).save_pretrained(tmp_path / "config")
    source = from_config(tmp_path / "config", tmp_path / "founded", seed=1)
    assert (source.kind, source.model.family) == (GRAPH, family)
    assert f"samples have {LENGTH} tokens" in source.remarks
    manifest = create_swarm("recurrent", source, Bootstraps(), mode=TRAIN).manifest
    assert manifest is not None
    (tmp_path / "text.txt").write_text("A state is carried from token to token. " * 4)
    settings = Run(
        data=bytes(32), steps=STEPS, batch=4, microbatch=2, optimizer="sgd", learning_rate=0.1, schedule="constant",
        clip=0.0, weight_decay=0.0,
    )  # fmt: skip
    run, batches = prepare(manifest, tmp_path / "founded", tmp_path / "text.txt", settings)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "founded", dtype=torch.float32).train()
    segment = load_segment(tmp_path / "founded", 0, manifest.model.units)
    sgd = torch.optim.SGD(whole.parameters(), 0.1)
    for report in train_locally(segment, run, batches):
        losses = []
        for number in range(run.microbatches):
            (ids_BT, *_) = (*batches.microbatch(report.step, number, run).inputs,)
            losses.append(whole(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss)
        loss = torch.stack(losses).mean()
        assert report.loss == pytest.approx(loss.item(), rel=1e-6)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
    trained = {name: tensor.detach() for part in segment.parameters().values() for name, tensor in part.items()}
    (tmp_path / "out").mkdir()
    write_module(trained, tmp_path / "founded", tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        torch.testing.assert_close(parameter, dict(whole.named_parameters())[name], rtol=0, atol=1e-6, msg=name)
    with pytest.raises(UsageError, match="less than one sample"):
        (tmp_path / "short.txt").write_text("short")
        prepare(manifest, tmp_path / "founded", tmp_path / "short.txt", settings)
