"""A checkpoint's folder appears whole or not at all, and replaces nothing that is no checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import LocalError, UsageError
from swarmnode.swarm.storage.small_files import check_free, new_folder


def test_it_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_folder(out) as folder:
        (folder / "config.json").write_text("{}")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_nothing_is_left_of_a_failure(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="oh"), new_folder(tmp_path / "out") as folder:
        (folder / "config.json").write_text("{}")
        raise ValueError("oh")
    assert not list(tmp_path.iterdir())


def test_only_a_checkpoint_is_replaced_and_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_free(out)
    (out / "config.json").write_text("old")
    with pytest.raises(UsageError, match="--force"), new_folder(out):
        pass
    with new_folder(out, force=True) as folder:
        (folder / "graph.json").write_text("new")
    assert [path.name for path in out.iterdir()] == ["graph.json"]
    (out / "letter.txt").write_text("precious")
    with pytest.raises(UsageError, match=r"letter\.txt"), new_folder(out, force=True):
        pass
    assert (out / "letter.txt").read_text() == "precious"
    with pytest.raises(UsageError, match="not a folder"):
        check_free(out / "letter.txt", force=True)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot write"), new_folder(tmp_path / "file" / "out"):
        pass
