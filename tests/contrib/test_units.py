"""contrib/systemd and `swarmnode service`: units that systemd understands, with commands that swarmnode understands."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from swarmnode.config import StageConfig
from tests.contrib.command_line import parse
from tests.contrib.script import CONTRIB, ROOT

UNITS = {
    "system": CONTRIB / "systemd" / "system" / "swarmnode@.service",
    "user": ROOT / "swarmnode" / "cli" / "lend" / "swarmnode@.service",  # what `swarmnode service install` writes
}
EXPOSURE = {"system": 1.5, "user": 7.0}  # of 10; what is left is the network, GPUs, and a user's own files

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed (Debian: apt install systemd)"
)


def settings(kind: str) -> list[tuple[str, str]]:
    """`Name=value` lines in order."""
    lines = UNITS[kind].read_text().splitlines()
    split = (line.partition("=") for line in lines if "=" in line and not line.startswith("#"))
    return [(name, value) for name, _, value in split]


def analyze(kind: str, *arguments: str, runtime: Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze as the system's or as a user's manager."""
    manager = ["--user"] if kind == "user" else []
    return subprocess.run(
        ["systemd-analyze", *manager, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
    )


def verify(kind: str, folder: Path, *, wrong: tuple[str, str] = ("", "")) -> subprocess.CompletedProcess[str]:
    """Let systemd judge the unit, or one with a mistake in it. Its program, which must be there, is `true` here."""
    program = str(shutil.which("true"))
    text = UNITS[kind].read_text().replace(*wrong)
    unit = folder / "swarmnode@.service"
    unit.write_text(text.replace("/usr/local/bin/swarmnode", program).replace("%h/.local/bin/swarmnode", program))
    return analyze(kind, "verify", str(unit), runtime=folder)


@needs_systemd
@pytest.mark.parametrize("kind", UNITS)
def test_systemd_finds_nothing_wrong(kind: str, tmp_path: Path) -> None:
    verified = verify(kind, tmp_path)
    assert (verified.returncode, verified.stderr) == (0, "")


@needs_systemd
@pytest.mark.parametrize("kind", UNITS)
def test_a_mistake_would_be_found(kind: str, tmp_path: Path) -> None:
    assert "kill mode" in verify(kind, tmp_path, wrong=("KillMode=mixed", "KillMode=mixd")).stderr


@needs_systemd
@pytest.mark.parametrize("kind", UNITS)
def test_little_is_exposed(kind: str, tmp_path: Path) -> None:
    threshold = str(round(EXPOSURE[kind] * 10))
    judged = analyze(kind, "security", "--offline=true", f"--threshold={threshold}", str(UNITS[kind]), runtime=tmp_path)
    assert judged.returncode == 0, judged.stdout[-200:]


@pytest.mark.parametrize("kind", UNITS)
@pytest.mark.parametrize("command", ["run", "host --door-only"])
def test_the_command_is_one_of_swarmnode(kind: str, command: str) -> None:
    program, *arguments = shlex.split(dict(settings(kind))["ExecStart"])
    assert Path(program).name == "swarmnode"
    words = {"$COMMAND": command.split(), "$OPTIONS": ["--metrics-port", "9464"]}
    assert parse([word for argument in arguments for word in words.get(argument, [argument])]) in command


@pytest.mark.parametrize("kind", UNITS)
def test_a_node_leaves_in_order(kind: str) -> None:
    """A signal to the whole group would end p2pd under a node that drains; systemd waits longer than the drain."""
    known = dict(settings(kind))
    assert known["KillMode"] == "mixed"
    assert int(known["TimeoutStopSec"].removesuffix("s")) > StageConfig().server.drain_s
