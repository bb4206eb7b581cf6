"""A swarm is founded on plain weights: GGUF is dequantised once, and nothing stays of what fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.client.model_files import context_limit
from swarmnode.compute.capacity.capacity import unit_sizes
from swarmnode.compute.model.checkpoint import Checkpoint
from swarmnode.errors import LocalError, UsageError
from swarmnode.founding import model_source
from swarmnode.founding.model_source import from_checkpoint, from_model, outline
from swarmnode.founding.swarm_creation import Bootstraps, create_swarm
from swarmnode.swarm.storage.swarmfile import load_swarm, save_swarm
from tests.compute.model.llama_gguf import save_llama_gguf
from tests.compute.model.test_hub import make_default, serving


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    save_llama_gguf(path)
    return path


def test_a_swarm_is_founded_on_a_gguf_file(file: Path, tmp_path: Path) -> None:
    source = from_model(str(file), tmp_path / "weights")
    assert (source.folder, source.original, source.model.hub_id) == (tmp_path / "weights", str(file), None)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in source.files}
    swarm = create_swarm("tiny", source, Bootstraps())
    save_swarm(swarm, tmp_path / "tiny.swarm")
    assert load_swarm(tmp_path / "tiny.swarm").original == str(file)
    plain = from_checkpoint(str(tmp_path / "weights"), tmp_path / "unused")
    assert not plain.original and not (tmp_path / "unused").exists()


def test_nothing_stays_of_what_is_interrupted_or_finds_no_place(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        from_checkpoint(str(file), tmp_path / "weights", progress=interrupted)
    assert sorted(tmp_path.iterdir()) == before
    usage = model_source.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(model_source.shutil, "disk_usage", lambda _folder: usage._replace(free=1000))
    with pytest.raises(LocalError, match="1 kB left"):
        from_checkpoint(str(file), tmp_path / "weights")
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_there_is_not_overwritten(file: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(UsageError, match=r"exists; name a folder|mine\.txt"):
            from_checkpoint(str(file), tmp_path / "weights", force=force)


@pytest.mark.parametrize("model", ["nowhere/there.gguf", "./there.gguf", "there.gguf"])
def test_a_file_that_is_not_there_is_no_hub_id(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such folder or GGUF file"):
        from_checkpoint(model, tmp_path / "weights")


def test_a_gguf_file_has_the_sizes_of_its_plain_weights(file: Path, tmp_path: Path) -> None:
    (tmp_path / "sizes").mkdir()
    looked_at, task = outline(str(file), tmp_path / "sizes")
    source = from_checkpoint(str(file), tmp_path / "weights")
    plain = Checkpoint(source.folder)
    assert isinstance(looked_at, Checkpoint) and task == "generate" and looked_at.dtype == plain.dtype
    for quantize in ("none", "nf4"):
        assert unit_sizes(looked_at, dtype=plain.dtype, quantize=quantize) == unit_sizes(
            plain, dtype=plain.dtype, quantize=quantize
        )
    assert context_limit(looked_at.path) == context_limit(plain.path)


def test_of_a_file_on_the_hub_only_the_header_is_fetched(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sizes"
    folder.mkdir()
    plain = Checkpoint(from_checkpoint(str(file), tmp_path / "weights").folder)
    for sizes in ((1 << 10, 1 << 16), (1 << 20,)):
        monkeypatch.setattr(model_source, "HEADER_BYTES", sizes)
        with serving(tmp_path) as hub:
            make_default(hub, monkeypatch)
            looked_at, task = outline("org/model/tiny.gguf", folder)
        assert isinstance(looked_at, Checkpoint) and task == "generate" and not hub.fetched
        assert looked_at.entries.keys() == plain.entries.keys()


@pytest.mark.parametrize("model", ["./there.gguf", "there.gguf", "nowhere/there.gguf"])
def test_a_file_that_is_not_there_has_no_sizes(model: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such GGUF file"):
        outline(model, tmp_path)
