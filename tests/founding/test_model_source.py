"""What a swarm is founded on: weights that follow from the seed, and nothing that the swarm does not need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.founding.model_source import from_checkpoint, from_config
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
from swarmnode.swarm.records.manifest import TRAIN
from tests.llama import save_llama

CONFIG = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 300}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("mine")
    return folder


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_seed_decides_the_weights(config: Path, tmp_path: Path) -> None:
    made = [from_config(config, tmp_path / f"out{number}", seed=seed) for number, seed in enumerate((1, 1, 2))]
    one, same, other = (weights(model_source.folder) for model_source in made)
    assert one == same != other
    assert (made[0].model.family, made[0].model.units, made[0].model.hidden) == ("gpt2", 3, 16)
    assert made[0].vocabulary == 300
    file = from_config(config / "config.json", tmp_path / "out3", seed=1)
    assert weights(file.folder) == one


def test_a_tokenizer_comes_along_unless_bytes_are_tokens(config: Path, tmp_path: Path) -> None:
    with_tokenizer = from_config(config, tmp_path / "words")
    names = {file.name for file in with_tokenizer.files}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "notes.txt" not in {path.name for path in with_tokenizer.folder.iterdir()}
    assert "tokenizer.json" not in {
        file.name for file in from_config(config, tmp_path / "bytes", byte_level=True).files
    }
    assert names - {
        file.name for file in from_checkpoint(str(tmp_path / "words"), tmp_path / "plain", byte_level=True).files
    } == {"tokenizer.json"}


def test_a_vocabulary_must_have_all_bytes_where_these_are_tokens(config: Path, tmp_path: Path) -> None:
    (config / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 255}))
    model_source = from_config(config, tmp_path / "words")
    assert create_swarm("words", model_source, Bootstraps(), mode=TRAIN).manifest is not None
    with pytest.raises(UsageError, match="at least 256"):
        from_config(config, tmp_path / "bytes", byte_level=True)
    assert not (tmp_path / "bytes").exists()
    with pytest.raises(UsageError, match="at least 256"):
        create_swarm(
            "bytes",
            from_checkpoint(str(tmp_path / "words"), tmp_path / "plain", byte_level=True),
            Bootstraps(),
            mode=TRAIN,
        )


def test_what_is_there_is_not_overwritten(config: Path, tmp_path: Path) -> None:
    out = from_config(config, tmp_path / "out", seed=1).folder
    before = weights(out)
    with pytest.raises(UsageError, match="exists; name a folder"):
        from_config(config, out, seed=2)
    assert weights(out) == before
    from_config(config, out, seed=2, force=True)
    assert weights(out) != before


def test_a_founder_is_told_of_special_tokens_beyond_the_vocabulary(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", layers=1)
    file = tmp_path / "model" / "config.json"
    values = json.loads(file.read_text())
    assert from_checkpoint(str(tmp_path / "model"), tmp_path / "plain").remarks == ()
    file.write_text(json.dumps({**values, "eos_token_id": values["vocab_size"]}))
    [remark] = from_checkpoint(str(tmp_path / "model"), tmp_path / "plain").remarks
    assert "eos_token_id beyond the vocabulary" in remark
