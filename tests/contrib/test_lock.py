"""What enters the image is named by version and hash, and is what pyproject.toml asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contrib.script import CONTRIB, ROOT, load

tomllib = pytest.importorskip("tomllib")  # since Python 3.11
lock = load(CONTRIB / "docker" / "lock.py")
PROJECT = tomllib.loads(lock.PROJECT.read_text())
ENVIRONMENT = {"python_version": lock.PYTHON, "python_full_version": f"{lock.PYTHON}.0", "sys_platform": "linux"}


@pytest.mark.parametrize(
    ("asked_for", "lists"),
    [
        (PROJECT["project"]["dependencies"], (lock.REQUIREMENTS, lock.TORCH)),
        (PROJECT["build-system"]["requires"], (lock.BUILD,)),
    ],
    ids=["image", "build"],
)
def test_the_lists_are_of_what_the_project_asks_for(asked_for: list[str], lists: tuple[Path, ...]) -> None:
    locked = {name: version for path in lists for name, version in lock.versions(path).items()}
    for text in asked_for:
        asked = Requirement(text)
        if asked.marker is None or asked.marker.evaluate(ENVIRONMENT):
            version = locked.get(canonicalize_name(asked.name))
            assert version is not None, f"{asked.name} is not locked: run contrib/docker/lock.py"
            assert asked.specifier.contains(version), f"{text}, and {version} is locked: run contrib/docker/lock.py"


def test_what_differs_by_device_is_in_a_list_of_its_own() -> None:
    assert "torch" in lock.versions(lock.TORCH)
    assert not [name for name in lock.versions(lock.REQUIREMENTS) if lock.is_of_torch(f"{name}==1")]
    assert "nvidia-ml-py" in lock.versions(lock.REQUIREMENTS)


def test_the_dockerfile_installs_them_by_hash() -> None:
    text = (ROOT / "Dockerfile").read_text()
    for path in (lock.REQUIREMENTS, lock.TORCH, lock.BUILD):
        assert f"--require-hashes --no-deps -r {path.name}" in text


def test_a_requirement_without_a_hash_is_none(tmp_path) -> None:
    (tmp_path / "list.txt").write_text("a==1 \\\n    --hash=sha256:00\nb==2\n")
    with pytest.raises(ValueError, match="b==2"):
        lock.versions(tmp_path / "list.txt")
