"""Nodes of an earlier version of the protocol beside ours: its package is taken out of the history, and run as it was."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.real.forked import ForkedSwarm
from tests.tiny import PROMPT, TinyModel

EARLIER = "9e87b32b187bc1da03437ecaaff9b4a207b93dc9"
ROOT = Path(__file__).parents[2]
NEW = 12


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """What goes before a command, so that the earlier version runs it."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", EARLIER, "swarmnode"], capture_output=True)
    if packed.returncode:
        pytest.skip("the earlier version is not in this checkout's history: it has no history, or a part of it")
    folder = tmp_path_factory.mktemp("earlier")
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
