"""The demo: one command that trains a swarm, kills a node meanwhile, and serves what was learnt."""

from __future__ import annotations

import json
import subprocess
import sys

STEPS = 20


def test_the_demo_succeeds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "swarmnode.cli.main", "demo", "--json", "--steps", str(STEPS)],
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["succeeded"]
    assert report["steps"] == STEPS
    assert report["last_loss"] < 0.8 * report["first_loss"]
    assert report["identical"]
    assert report["left_running"] == 0
    assert report["text"].startswith("Beautiful is better") and report["recited"] >= len("Beautiful is better")
