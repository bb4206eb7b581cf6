"""Settings are completed from model and data, and refused where they do not fit either."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from swarmnode.cli.train.recipe import RecipeOptions
from swarmnode.client.training.preparation import NO_DATA, as_older_versions, check_early, prepare
from swarmnode.compute.graph.exporting.module_export import export_module
from swarmnode.compute.graph.serialise import write_graph
from swarmnode.data.samples import DataRules
from swarmnode.errors import UsageError
from swarmnode.swarm.records.manifest import CAUSAL_LM, GRAPH, SERVE, TRAIN, Manifest, ModelInfo
from swarmnode.swarm.records.run import RECIPE, Recipe, Run
from swarmnode.swarm.storage.content import FileContent

SETTINGS = Run(data=NO_DATA, steps=3, batch=8, microbatch=0)


def manifest(kind: str, *names: str, mode: str = TRAIN) -> Manifest:
    files = tuple(FileContent(name, 1, bytes(32)) for name in names)
    return Manifest("school", ModelInfo("any", 3, 1, positions=48), files, created=0, kind=kind, mode=mode)


LANGUAGE = manifest(CAUSAL_LM, "config.json", "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"model_type": "gpt2", "n_positions": 48, "vocab_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "data.txt").write_text("some words and some more " * 10)
    return tmp_path


def settings(**changes: object) -> Run:
    return msgspec.structs.replace(SETTINGS, **changes)


def test_what_is_not_said_is_chosen(folder: Path) -> None:
    run, batches = prepare(LANGUAGE, folder, folder / "data.txt", SETTINGS)
    assert (run.sequence, run.microbatch) == (48, 4), "no longer than the model's positions"
    assert run.data == batches.fingerprint
    (ids_BT,) = batches.microbatch(0, 0, run).inputs
    assert ids_BT.shape == (4, 48)
    assert bytes(ids_BT[0].tolist()).isascii(), "bytes are tokens"
    assert prepare(LANGUAGE, folder, folder / "data.txt", settings(batch=2))[0].microbatch == 2
    chosen = prepare(LANGUAGE, folder, folder / "data.txt", settings(sequence=16, microbatch=8))[0]
    assert (chosen.sequence, chosen.microbatch) == (16, 8)


def test_the_swarms_tokenizer_is_used_and_no_other(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"<eos>": 0, "some": 1, "words": 2, "and": 3, "more": 4}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(folder)
    with_tokenizer = manifest(CAUSAL_LM, "config.json", "model.safetensors", "tokenizer.json")
    run, batches = prepare(with_tokenizer, folder, folder / "data.txt", settings(sequence=3, steps=1))
    tokens = [token for number in range(17) for token in batches.rows([number], run).inputs[0][0].tolist()]
    assert tokens == [1, 2, 3, 1, 4] * 10 + [0]
    run, batches = prepare(LANGUAGE, folder, folder / "data.txt", settings(sequence=4))
    assert batches.rows([0], run).inputs[0][0].tolist() == list(b"some"), "the swarm was founded without it"


def test_arrays_of_ids_need_no_tokenizer(folder: Path) -> None:
    ids_NT = np.arange(60).reshape(10, 6)
    np.savez(folder / "ids.npz", input_ids=ids_NT)
    run, batches = prepare(LANGUAGE, folder, folder / "ids.npz", settings(sequence=6))
    ids_BT = batches.rows(range(10), run).inputs[0]
    assert sorted(ids_BT.tolist()) == ids_NT.tolist() and run.label_weights
    np.savez(folder / "ids.npz", input_ids=ids_NT + 197)
    with pytest.raises(UsageError, match="256"):
        prepare(LANGUAGE, folder, folder / "ids.npz", settings(sequence=6))
    (folder / "chats.jsonl").write_text('{"prompt": "some", "completion": "words"}\n')
    with pytest.raises(UsageError, match="need a tokenizer"):
        prepare(LANGUAGE, folder, folder / "chats.jsonl", settings(sequence=6))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sequence": 49}, "48 positions"),
        ({"microbatch": 3}, "multiple of the microbatch"),
        ({"steps": 0}, "at least one step"),
        ({"learning_rate": float("nan")}, "finite"),
    ],
)
def test_settings_that_cannot_be(folder: Path, changes: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        prepare(LANGUAGE, folder, folder / "data.txt", settings(**changes))


def test_what_is_known_early(folder: Path) -> None:
    check_early(folder / "data.txt", SETTINGS)
    with pytest.raises(UsageError, match="no such file"):
        check_early(folder / "none.txt", SETTINGS)
    (folder / "empty").mkdir()
    (folder / "empty.txt").touch()
    for nothing in (Path("/dev/null"), folder / "empty", folder / "empty.txt"):
        with pytest.raises(UsageError, match=r"no such file|nothing to train on"):
            check_early(nothing, SETTINGS)
    with pytest.raises(UsageError, match="schedule"):
        check_early(folder / "data.txt", settings(schedule="zigzag"))
    check_early(folder / "data.txt", SETTINGS, folder / "log.jsonl")
    with pytest.raises(UsageError, match=r"--log .* these are the data"):
        check_early(folder / "data.txt", SETTINGS, folder / "empty" / ".." / "data.txt")


def test_only_swarms_that_train(folder: Path) -> None:
    with pytest.raises(UsageError, match="--mode train"):
        prepare(manifest(CAUSAL_LM, "config.json", mode=SERVE), folder, folder / "data.txt", SETTINGS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


@pytest.mark.parametrize("any_batch", [True, False])
def test_a_graph_says_how_many_samples_it_takes(tmp_path: Path, any_batch: bool) -> None:
    write_graph(export_module(Net(), (torch.zeros(2, 3),), any_batch=any_batch), tmp_path)
    np.savez(tmp_path / "data.npz", x=np.zeros((10, 3)))
    graph = manifest(GRAPH, "graph.json", "model.safetensors")
    run, batches = prepare(graph, tmp_path, tmp_path / "data.npz", SETTINGS)
    assert (run.microbatch, run.sequence) == (4 if any_batch else 2, 0)
    assert batches.samples(run) == 10
    with pytest.raises(UsageError, match="--sequence is for language models"):
        prepare(graph, tmp_path, tmp_path / "data.npz", settings(sequence=5))
    (tmp_path / "chats.jsonl").write_text('{"prompt": "1 + 1?", "completion": "2"}\n')
    with pytest.raises(UsageError, match="give a module text"):
        prepare(graph, tmp_path, tmp_path / "chats.jsonl", SETTINGS)
    with pytest.raises(UsageError, match="--router-balance"):
        prepare(graph, tmp_path, tmp_path / "data.npz", settings(schedule=RECIPE, recipe=Recipe(router_balance=0.1)))
    if not any_batch:
        with pytest.raises(UsageError, match="--microbatch 2"):
            prepare(graph, tmp_path, tmp_path / "data.npz", settings(microbatch=4))


def test_a_run_of_an_earlier_version_is_known_again(folder: Path) -> None:
    """It had no recipe; settings that it could not have had are no run of it."""
    what = (LANGUAGE, folder, folder / "data.txt")
    before, _ = prepare(*what, settings(warmup_steps=2))
    now = settings(warmup_steps=2, schedule=RECIPE, recipe=Recipe("cosine"))
    assert prepare(*what, now)[0] != before
    assert before in [run for run, _ in as_older_versions(*what, now, DataRules())]
    later = settings(schedule=RECIPE, recipe=Recipe("hf-cosine"))
    assert as_older_versions(*what, later, DataRules()) == []


def test_a_run_that_balanced_all_layers_together_is_known_again(folder: Path) -> None:
    """A trainer that asks for the balance of each layer goes on with the run that its earlier version began."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "mixtral", "vocab_size": 256, "max_position_embeddings": 48})
    )
    what, before = (LANGUAGE, folder, folder / "data.txt"), Recipe(router_balance=0.1)
    by_layer = settings(schedule=RECIPE, recipe=RecipeOptions(router_balance=0.1).made("cosine", ()))
    assert by_layer.known_recipe.balance_by_layer is True
    older = [run.known_recipe for run, _ in as_older_versions(*what, by_layer, DataRules())]
    assert older == [before, before]
    assert RecipeOptions(router_z_loss=0.1).made("cosine", ()).balance_by_layer is msgspec.UNSET
