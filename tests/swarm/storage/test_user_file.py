from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.storage.small_files import read_user_file


def read(path: Path) -> bytes | None:
    return read_user_file(path, max_bytes=1 << 16, what="a list")


def test_what_is_there_is_read_and_what_is_not_is_none(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abcd")
    assert read(tmp_path / "a") == b"abcd"
    assert read(tmp_path / "b") is None
    assert read(tmp_path / "a" / "b") is None, "a file is no folder"


def test_it_is_said_why_a_file_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(1 << 17))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "endless").symlink_to("/dev/zero")
    for name, why in (
        ("large", "large is too large, not a list"),
        ("endless", "endless is too large, not a list"),
        (".", "is a folder, not a list"),
        ("loop", "cannot read .*loop: Too many levels"),
    ):
        with pytest.raises(UsageError, match=why):
            read(tmp_path / name)
