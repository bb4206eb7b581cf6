"""Files and folders that are not as a command needs them: told in one line, and nothing is left behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import assert_clear, invoke
from tests.cli.permissions import as_anybody, on_a_full_disk
from tests.llama import save_llama

DATA = ("--data", "swarm.swarm", "--steps", "1")
READS = [
    ("create", "x", "--model", "{}"),
    ("create", "x", "--mode", "train", "--config", "{}"),
    ("create", "x", "--module", "{}.pt2"),
    ("create", "x", "--model", "model", "--private", "--owner-key", "{}"),
    ("create", "x", "--model", "model", "--private", "--password-file", "{}"),
    ("host", "{}", "--name", "x"),
    ("fit", "{}"),
    ("status", "{}"),
    ("run", "{}"),
    ("host", "--door-only", "{}"),
    ("generate", "{}", "text"),
    ("serve", "{}"),
    ("join", "{}"),
    ("invite", "{}"),
    ("revoke", "{}", "somebody"),
    ("members", "{}"),
    ("export", "{}", "out"),
    ("train", "{}", *DATA),
    ("train", "swarm", "--data", "{}", "--steps", "1"),
    ("run", "swarm", "--rules", "{}"),
    ("run", "swarm", "--plan", "{}"),
    ("run", "swarm", "--config", "{}"),
    ("config", "--show", "--config", "{}"),
    ("serve", "swarm", "--keys", "{}"),
    ("infer", "swarm", "--input", "{}"),
    ("plan", "{}", "--model", "model"),
    ("plan", "simulate", "{}", "--model", "model"),
]
EMPTY_IS_FINE = {"--rules", "--config"}  # a file without options has none
WRITES = [
    ("create", "{}/x", "--model", "model"),
    ("create", "{}/x", "--model", "model", "--private"),
    ("create", "{}/x", "--mode", "train", "--config", "model"),
    ("host", "model", "--name", "{}/x"),
    ("host", "model", "--name", "x", "--home", "{}/home"),
    ("infer", "swarm", "--input", "x.npz", "--output", "{}/y.npz"),
    ("status", "swarm", "--export", "--output", "{}/network.json"),
    ("serve", "swarm", "--new-key", "me", "--keys", "{}/keys"),
    ("join", "invite", "--home", "{}/home"),
    ("doctor", "--id", "--home", "{}/home"),
    ("run", "swarm", "--home", "{}/home"),
    ("invite", "{}/private"),
]


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, an open swarm, its invite, and a private swarm."""
    folder = tmp_path_factory.mktemp("founded")
    save_llama(folder / "model", 1, vocab_size=64, hidden_size=16, intermediate_size=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
        (folder / "invite").write_text(
            invoke("create", "swarm", "--model", "model", "--open", "--quiet", cwd=folder).stdout
        )
        assert invoke("create", "private", "--model", "model", "--private", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def place(founded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, where commands are typed."""
    monkeypatch.setenv("SWARMNODE_OWNER_PASSWORD", "correct horse")
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    return shutil.copytree(founded, tmp_path / "place")


def content(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*")}


def assert_refused(command: tuple[str, ...], file: str, place: Path) -> None:
    """By one line and its exit code, with everything left as it was."""
    before = content(place)
    done = invoke(*(each.format(file) for each in command), cwd=place)
    assert_clear(done, 2 if done.returncode == 2 else 1)
    assert len(done.stderr.strip().splitlines()) == 1 and content(place) == before


@pytest.mark.parametrize("command", READS, ids=" ".join)
def test_what_cannot_be_read(command: tuple[str, ...], place: Path) -> None:
    kinds: dict[str, Callable[[Path], object]] = {
        "missing": lambda path: path,
        "empty": Path.touch,
        "binary": lambda path: path.write_bytes(bytes(range(256)) * 50),
        "folder": Path.mkdir,
        "secret": lambda path: (path.write_text("text"), path.chmod(0)),
    }
    for kind, make in kinds.items():
        make(place / kind)
        if kind != "empty" or not EMPTY_IS_FINE & set(command):
            with as_anybody():
                assert_refused(command, kind, place)


@pytest.mark.parametrize("command", WRITES, ids=" ".join)
def test_a_folder_that_cannot_be_written(command: tuple[str, ...], place: Path) -> None:
    folder = shutil.copytree(place, place / "shared")
    folder.chmod(0o555)
    try:
        with as_anybody():
            assert_refused(command, "shared", place)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("left_bytes", [0, 20])
@pytest.mark.parametrize(
    "command",
    [
        ("create", "x", "--model", "model"),
        ("create", "x", "--model", "model", "--private"),
        ("create", "x", "--mode", "train", "--config", "model"),
        ("host", "model", "--name", "x"),
        ("serve", "swarm", "--new-key", "me", "--keys", "keys"),
        ("join", "invite"),
        ("doctor", "--id"),
        ("invite", "private"),
    ],
    ids=" ".join,
)
def test_a_full_disk(command: tuple[str, ...], left_bytes: int, place: Path) -> None:
    with on_a_full_disk(left_bytes):
        assert_refused(command, "", place)
