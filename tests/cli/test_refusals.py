"""Wrong input at the command line: one clear line, the right exit code, no stack trace. With a swarm: tests/real/test_cli.py."""

from __future__ import annotations

import gc
import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import assert_clear, invoke
from tests.tiny import TinyModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel.save(tmp_path_factory.mktemp("tiny"), layers=2)


@pytest.fixture(scope="module")
def file(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a swarm that nobody is in."""
    path = tmp_path_factory.mktemp("founded") / "local.swarm"
    assert invoke("create", str(path), "--model", str(tiny.folder), "--open", "--quiet").returncode == 0
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))


def test_create_writes_a_private_file_and_prints_an_invite_alone(tiny: TinyModel, tmp_path: Path) -> None:
    file = tmp_path / "mine.swarm"
    done = invoke("create", str(tmp_path / "mine"), "--model", str(tiny.folder), "--open", "--quiet")
    assert done.stdout.startswith("swarm1") and len(done.stdout.split()) == 1
    assert file.stat().st_mode & 0o777 == 0o600
    assert_clear(invoke("create", str(tmp_path / "mine"), "--model", "x"), 2, "already exists")


@pytest.mark.parametrize("command", [("run",), ("serve",), ("generate", "text")], ids=" ".join)
def test_a_command_that_fails_as_it_starts_leaves_the_collector_on(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "no.swarm").write_text("{}")
    first, *rest = command
    assert_clear(invoke(first, str(tmp_path / "no.swarm"), *rest), 2)
    assert gc.isenabled()


def test_what_is_not_a_swarm_is_refused(tmp_path: Path, tiny: TinyModel) -> None:
    invite = invoke("create", str(tmp_path / "mine"), "--model", str(tiny.folder), "--open", "--quiet").stdout.strip()
    text = tmp_path / "text.swarm"
    text.write_text("hello")
    damaged = invite[:-3] + "abc"
    for source, word in ((str(text), "not a"), (str(tmp_path / "none.swarm"), "no such file"), (damaged, "damaged")):
        assert_clear(invoke("status", source), 2, word)
        assert_clear(invoke("run", source), 2, word)


def test_models_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path: Path, tiny: TinyModel) -> None:
    truncated = shutil.copytree(tiny.folder, tmp_path / "truncated")
    with (truncated / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    encoder = tmp_path / "t5"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    shutil.copy(tiny.folder / "model.safetensors", encoder)
    for model, exit_code, word in (
        (truncated, 1, "truncated"),
        (encoder, 1, "encoder-decoder"),
        (tmp_path / "nowhere", 2, "no such"),
    ):
        assert_clear(invoke("create", str(tmp_path / "s"), "--model", str(model)), exit_code, word)
        assert not (tmp_path / "s.swarm").exists()


def test_a_plan_of_another_swarm_is_refused(file: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    stages = [{"units": [0, 4], "devices": [0]}]
    for swarm in ({}, {"swarm": "00" * 32, "peers": ["a"]}):
        plan.write_text(json.dumps({"stages": stages, "pipelines": [[0]], **swarm}))
        assert_clear(invoke("run", str(file), "--plan", str(plan)), 2, "not for this swarm")


def test_wrong_options_of_generate(file: Path) -> None:
    for arguments in ((), ("text", "--ids", "1"), ("--ids", "a,b"), ("--ids", "-1")):
        assert invoke("generate", str(file), *arguments).returncode == 2
