"""contrib/attacks: what strangers tried is withstood; the suite carries out the fast ones."""

from __future__ import annotations

import sys

import pytest

from tests.contrib.script import CONTRIB, load

FOLDER = CONTRIB / "attacks"
sys.path.append(str(FOLDER))  # scripts import what stands beside them
RUN = load(FOLDER / "run.py")
SCRIPTS = RUN.scripts()


def test_every_script_says_what_it_does() -> None:
    assert len(SCRIPTS) > 0
    assert [script.name for script in SCRIPTS if not script.does.endswith(".")] == []


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.fast], ids=lambda script: script.name)
def test_withstood(script: object) -> None:
    module = load(script.path)  # type: ignore[attr-defined]
    outcome = load(FOLDER / "attack.py").perform(module.attack, virtual=True)
    assert outcome.held, outcome.happened


def test_the_table_tells_of_a_script_that_breaks(tmp_path, monkeypatch) -> None:
    script = tmp_path / "breaks.py"
    script.write_text('"""Breaks."""\nVIRTUAL, FAST = True, True\nraise SystemExit("a fault")\n')
    monkeypatch.setattr(RUN, "FOLDER", tmp_path)
    (found,) = RUN.scripts()
    assert RUN.carry_out(found).succeeded
