"""Rules as people write them."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from swarmnode.cli.options.node_options import RuleOptions, parse_rules, read_rules
from swarmnode.errors import UsageError
from swarmnode.lending.lending import Hours, Rules
from swarmnode.terminal.option import build
from tests.cli.command import assert_clear, invoke


def test_flags_count_before_the_file(tmp_path: Path) -> None:
    assert not read_rules(tmp_path, build(RuleOptions, {"hours": "", "exclusive": []})).any
    (tmp_path / "rules.toml").write_text(
        'only_idle = "10m"\nmax_load = "25%"\nexclusive = ["steam"]\non_mains = true\nmonthly = "1GB"\n'
    )
    typed = {"max_others_load": "50%", "max_memory_pressure": "10%", "hours": "9:00-17:30"}
    rules = read_rules(tmp_path, build(RuleOptions, typed))
    assert rules == Rules(
        only_idle_s=600,
        max_others_load=0.5,
        exclusive=frozenset({"steam"}),
        hours=Hours(datetime.time(9), datetime.time(17, 30)),
        on_mains=True,
        max_memory_pressure=0.1,
        monthly_bytes=10**9,
    )


@pytest.mark.parametrize(
    ("text", "days"), [("mon-fri", {0, 1, 2, 3, 4}), ("sat,sun", {5, 6}), ("fri-mon", {4, 5, 6, 0}), ("Wed", {2})]
)
def test_days(text: str, days: set[int]) -> None:
    assert parse_rules({"days": text}).days == days


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ({"sleep": "10m"}, "no rule 'sleep'"),
        ({"hours": "22-7"}, "22:00-07:00"),
        ({"hours": "25:00-07:00"}, "22:00-07:00"),
        ({"days": "someday"}, "mon-fri"),
        ({"days": "mon-"}, "mon-fri"),
        ({"max_load": "0.5"}, "25%"),
        ({"max_load": 25}, "in quotes"),
        ({"only_idle": "soon"}, "not a duration"),
        ({"exclusive": "steam"}, "list"),
        ({"exclusive": [1]}, "list"),
        ({"on_mains": "yes"}, "true or false"),
        ({"monthly": "500"}, "500GB"),
        ({"month_day": "31"}, "1 to 28"),
        ({"month_day": 15}, "in quotes"),
        ({"max_gpu_memory": "2"}, "2GB"),
        ({"max_gpu_load": "25"}, "25%"),
    ],
)
def test_what_is_no_rule(texts: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_rules(texts)


@pytest.mark.parametrize("content", [b"hours = [", b"\xff", b"x" * (1 << 17)])
def test_what_is_no_file_of_rules(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rules.toml").write_bytes(content)
    assert_clear(invoke("run", "x", "--home", str(tmp_path)), 2, "rules.toml")
    assert_clear(invoke("run", "x", "--home", str(tmp_path), "--rules", str(tmp_path / "none")), 2, "no such file")
