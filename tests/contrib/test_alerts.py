"""The alert rules under promtool's own tests, and those tests under wrong rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.real.prometheus import CONTRIB, needs_prometheus, promtool

pytestmark = needs_prometheus

ALERTS = CONTRIB / "prometheus" / "alerts.yml"
TESTS = CONTRIB / "prometheus" / "alerts_test.yml"


def test_the_rules_are_well_formed() -> None:
    checked = promtool("check", "rules", str(ALERTS))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_each_alert_fires_when_it_should() -> None:
    tested = promtool("test", "rules", str(TESTS))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_test() -> None:
    names = [line.split()[-1] for line in ALERTS.read_text().splitlines() if "- alert:" in line]
    asked = TESTS.read_text()
    assert names and not [name for name in names if f"alertname: {name}\n" not in asked]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for: 2m", "for: 20m"),
        ("< 0.05", "< 0.01"),
        ("min by (swarm) (swarmnode_units", "max by (swarm) (swarmnode_units"),
    ],
)
def test_the_tests_notice_wrong_rules(tmp_path: Path, right: str, wrong: str) -> None:
    text = ALERTS.read_text()
    assert right in text
    (tmp_path / "alerts.yml").write_text(text.replace(right, wrong))
    tests = yaml.safe_load(TESTS.read_text())
    short = [test for test in tests["tests"] if "for a day" not in test["name"]]  # each minute of which is evaluated
    (tmp_path / TESTS.name).write_text(yaml.safe_dump({**tests, "tests": short}))
    assert promtool("test", "rules", str(tmp_path / TESTS.name)).returncode == 1
