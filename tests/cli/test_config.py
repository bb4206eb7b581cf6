"""Options of a node out of flags, the environment and a file: which counts, and what is told where one is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.config import StageConfig
from swarmnode.lending.lending import Lending, Rules
from swarmnode.node.node_config import NodeConfig
from swarmnode.peer.host_config import HostConfig
from tests.cli.command import assert_clear, invoke


def test_each_value_and_where_it_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node.toml").write_text(
        'memory = "6GB"\nmax_upload = "8Mbit"\nexclusive = ["steam", "blender"]\nlan = true\nthreads = 3\n'
    )
    monkeypatch.setenv("SWARMNODE_RUN_MAX_UPLOAD", "2Mbit")
    monkeypatch.setenv("SWARMNODE_RUN_HOST_MADDR", "/ip4/127.0.0.1/tcp/4002 /ip4/127.0.0.1/tcp/4003")
    done = invoke("config", "--show", "--json", "--memory", "4GB", home=tmp_path)
    assert done.returncode == 0, done.stderr
    rows: dict[str, Any] = {row["option"]: (row["value"], row["from"]) for row in json.loads(done.stdout)}
    assert rows["--memory"] == ("4GB", "flag") and len(rows["--host-maddr"][0]) == 2
    assert rows["--max-upload"] == ("2Mbit", "environment SWARMNODE_RUN_MAX_UPLOAD")
    assert rows["--exclusive"] == (["steam", "blender"], f"file {tmp_path / 'node.toml'}")
    assert rows["--lan"][0] is True and rows["--threads"][0] == 3 and rows["--device"] == ("auto", "default")
    assert "environment SWARMNODE_HOME" in rows["--home"]
    shown = invoke("config", "--show", home=tmp_path).stdout
    assert "2Mbit" in shown and "steam, blender" in shown


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('memroy = "6GB"', ("memroy", "'memory'")),
        ("memory = 6", ("--memory 6", "the unit is missing")),
        ('memory = ["6GB"]', ("one value",)),
        ('exclusive = "steam"', ("a list",)),
        ('lan = "yes"', ("true or false",)),
        ("device = true", ("not true or false",)),
        ('home = "/"', ("no option 'home'",)),
        ("= 1", ("not a file of options",)),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    (tmp_path / "node.toml").write_text(text)
    for command in ("config", "run"):
        assert_clear(invoke(command, home=tmp_path), 2, *words)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert_clear(invoke("config", "--config", str(tmp_path / "none.toml"), home=tmp_path), 2, "no such file")
    assert "valid" in invoke("config", home=tmp_path).stdout


def test_rules_and_rates_change_in_a_running_node(tmp_path: Path) -> None:
    host = HostConfig(tmp_path, max_upload_bps=1e6)
    old = NodeConfig(host)
    assert old.fixed(NodeConfig(replace(host, max_upload_bps=2e6), rules=Rules(on_mains=True))) == []
    assert old.fixed(NodeConfig(replace(host, max_upload_bps=None), StageConfig(device="cpu"))) == [
        "max_upload_bps",
        "device",
    ]


async def test_who_waits_for_rules_hears_of_the_first() -> None:
    lending = Lending()
    lending.follow(Rules(on_mains=True))
    await lending.ruled()
    assert lending.rules.on_mains
