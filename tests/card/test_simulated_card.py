"""The tests of this folder on a simulated card, in a process of its own: what makes a card of a process cannot be undone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.card.simulated import CannotBuild, library_path

FOLDER = Path(__file__).parent
LONGEST_S = 1800  # of what hangs; nothing is to be fast


@pytest.mark.timeout(3 * LONGEST_S)
def test_on_a_simulated_card() -> None:
    try:
        library_path()
    except CannotBuild as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "tests.card.simulated", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--color=no", str(FOLDER)],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
