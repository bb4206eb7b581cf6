"""Nodes of an earlier version of the protocol beside ours: its package is taken out of the history, and run as it was."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gateway.speaking import save_speaking_llama
from tests.real import test_training
from tests.real.forked import ForkedSwarm
from tests.real.test_training import DATA, read_log
from tests.tiny import PROMPT, TinyModel
from tests.training_results import assert_same_curve

FIRST = "9e87b32b187bc1da03437ecaaff9b4a207b93dc9"  # of the protocol
LAST = "23c7121780a7e8edbcf3533ee6e65432f2d21ec2"  # before each deed had one mechanism
ROOT = Path(__file__).parents[2]
NEW = 12
model = test_training.model  # a fixture
STEPS = 4
FEW_STEPS = (
    "--data", str(DATA), "--steps", str(STEPS), "--batch", "8", "--microbatch", "2", "--sequence", "32", "--lr", "1e-3",
    "--weight-decay", "0",
)  # fmt: skip


@pytest.fixture(scope="module")
def run_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, ...]]:
    """commit -> what goes before a command that shall be run by it. Each version is unpacked, and compiled, once."""
    return functools.cache(lambda commit: earlier_version(commit, tmp_path_factory.mktemp("earlier")))


@pytest.fixture(scope="module", params=(FIRST, LAST))
def earlier(request: pytest.FixtureRequest, run_by: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
    """Return what goes before a command, so that the earlier version runs it."""
    return run_by(request.param)


def earlier_version(commit: str, folder: Path) -> tuple[str, ...]:
    """Unpack the package of a commit into `folder`, and return what goes before a command that shall be run by it."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "swarmnode"], capture_output=True)
    if packed.returncode:
        pytest.skip("the earlier version is not in this checkout's history: it has no history, or a part of it")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    inside = ("env", "-C", str(folder))
    where = [*inside, sys.executable, "-c", "import swarmnode; print(swarmnode.__file__)"]
    assert Path(subprocess.check_output(where, text=True).strip()).is_relative_to(folder)
    return inside


def test_neighbouring_versions_serve_together(tiny: TinyModel, earlier: tuple[str, ...], tmp_path: Path) -> None:
    """One stage of each, and a client of each."""
    with ForkedSwarm(tmp_path) as local:
        local.create(tiny.folder)
        local.bootstrap()
        for member in (
            local.node("theirs", "--span", "0:3", inside=earlier),
            local.node("ours", "--span", "3:6"),
        ):
            member.wait_for("ready")
        asked = (
            "generate",
            str(local.file),
            "--ids",
            ",".join(map(str, PROMPT)),
            "--max-new-tokens",
            str(NEW),
            "--json",
        )
        expected = tiny.alone(PROMPT, NEW)
        for inside in ((), earlier):
            told = local.command(*asked, inside=inside)
            assert str(expected)[1:-1] in told.replace("\n", "")


def test_neighbouring_versions_train_together(
    model: Path, run_by: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    """A stage of each, and a trainer of each after the other: the losses are those of one process."""
    inside = run_by(LAST)
    with ForkedSwarm(tmp_path) as local:
        local.create(model, "--mode", "train")
        local.bootstrap()
        for member in (
            local.node("theirs", "--span", "0:3", "--compress", "none", inside=inside),
            local.node("ours", "--span", "3:6", "--compress", "none"),
        ):
            member.wait_for("ready")
        losses = {}
        for name, settings in {"alone": ("--local",), "ours": (), "theirs": ()}.items():
            log = tmp_path / f"{name}.jsonl"
            seed = ("--seed", "8") if name == "theirs" else ("--seed", "7")  # a run of its own
            command = ("train", str(local.file), "--log", str(log), *FEW_STEPS, *seed, *settings)
            local.command(*command, inside=inside if name == "theirs" else ())
            losses[name] = read_log(log)
    assert_same_curve(losses["ours"], losses["alone"], steps=STEPS)
    assert len(losses["theirs"]) == STEPS


def test_neighbouring_versions_tune_together(run_by: Callable[[str], tuple[str, ...]], tmp_path: Path) -> None:
    """A stage of each, and an owner of each after the other: the losses are those of one process."""
    inside = run_by(LAST)
    model, data = tmp_path / "model", tmp_path / "chats.jsonl"
    save_speaking_llama(model)
    data.write_text("\n".join(json.dumps({"prompt": f"Say {word}.", "completion": word}) for word in ["one", "two"]))
    with ForkedSwarm(tmp_path) as local:
        local.create(model)
        local.bootstrap()
        for member in (
            local.node("theirs", "--span", "0:2", "--tune-share", "50%", "--compress", "none", inside=inside),
            local.node("ours", "--span", "2:4", "--tune-share", "50%", "--compress", "none"),
        ):
            member.wait_for("ready")
        losses = {}
        for name, settings in {"alone": ("--local",), "ours": (), "theirs": ()}.items():
            size = ("--steps", "2", "--batch", "2", "--microbatch", "1", "--sequence", "16", "--rank", "2")
            written = ("--out", str(tmp_path / name), "--log", str(tmp_path / f"{name}.log"))
            command = ("tune", str(local.file), "--data", str(data), *size, *written, *settings)
            local.command(*command, inside=inside if name == "theirs" else ())
            losses[name] = [row["loss"] for row in map(json.loads, (tmp_path / f"{name}.log").read_text().splitlines())]
    assert losses["ours"] == pytest.approx(losses["alone"], rel=1e-4)
    assert losses["theirs"] == pytest.approx(losses["alone"], rel=1e-4)
