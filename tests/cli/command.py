"""The `swarmnode` command, as a process of its own or in this one."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing

from swarmnode.cli.main import app

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240.0  # processes take long on a machine that is busy

typer.testing._get_command = functools.cache(typer.testing._get_command)
"""Else forty commands would be made of their signatures each time, which takes longer than what most tests have one do."""


def swarmnode(*arguments: str, home: Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "swarmnode.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env={**os.environ, "SWARMNODE_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def invoke(
    *arguments: str, home: Path | None = None, cwd: Path | None = None, given: str | None = None
) -> subprocess.CompletedProcess[str]:
    """As `swarmnode`, in this process, which has imported the heavy packages already. `given` is its standard input."""
    environment = {"SWARMNODE_HOME": str(home)} if home is not None else None
    with pytest.MonkeyPatch.context() as patch:
        if cwd is not None:
            patch.chdir(cwd)
        result = typer.testing.CliRunner().invoke(app, arguments, input=given, env=environment)
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def assert_clear(done: subprocess.CompletedProcess[str], exit_code: int, *words: str) -> None:
    """It failed with that code, and the last line says why."""
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ")
    for word in words:
        assert word in line
