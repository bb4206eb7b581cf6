"""Options that an owner changes while the node runs: what is checked, what is kept where, and what wins at the next start."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer

from swarmnode.cli.main import app
from swarmnode.cli.options.node_file import LendingOptions, with_limits
from swarmnode.cli.options.node_options import NodeOptions, read_rules
from swarmnode.errors import LocalError, UsageError
from swarmnode.lending.cards import CardLimits
from swarmnode.node.description import lent
from swarmnode.node.node import Node
from swarmnode.swarm.storage.swarmfile import Swarm
from swarmnode.terminal.option import build


def running(home: Path, *flags: str) -> tuple[Node, LendingOptions]:
    """A node as `swarmnode run FLAGS` makes it, and its options."""
    context: Any = typer.main.get_command(app).make_context("swarmnode", ["run", "friends"])
    args = ["friends", "--home", str(home), *flags]
    taken = context.command.get_command(context, "run").make_context("run", args, parent=context)
    node = Node(Swarm(bytes(32), "friends"), build(NodeOptions, taken.params).config())
    return node, LendingOptions(home, node, taken)


def hosting(home: Path, *flags: str) -> tuple[Node, LendingOptions]:
    """A node as `swarmnode host FLAGS` makes it, and its options."""
    args = ["./tiny", "--name", "school", "--home", str(home), *flags]
    context: Any = typer.main.get_command(app).make_context("swarmnode", ["host", *args])
    taken = context.command.get_command(context, "host").make_context("host", args, parent=context)
    base = NodeOptions(home=home, name="tower", device="cpu")
    node = Node(Swarm(bytes(32), "school"), with_limits(base, taken.params))
    return node, LendingOptions(home, node, taken, partial(with_limits, base))


CHANGES = {
    "memory": "1GB",
    "disk": "20GB",
    "cpu_share": "50%",
    "max_upload": "8Mbit",
    "max_download": "9Mbit",
    "hours": "22:00-07:00",
    "only_idle": "10m",
    "exclusive": ["blender"],
    "max_gpu_temperature": "70",
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("begin", [running, hosting])
def test_a_host_lends_by_the_same_options_as_a_volunteer(
    begin: Callable[..., tuple[Node, LendingOptions]], name: str, tmp_path: Path
) -> None:
    """From a flag, from a change on the page, and at the next start; the rest of its command stays as it is."""
    value = CHANGES[name]
    texts = value if isinstance(value, list) else [value]
    flags = [word for text in texts for word in (f"--{name.replace('_', '-')}", text)]
    given, with_flag = begin(tmp_path / "flags", *flags)
    assert values(with_flag)[name] == (value, flags[0])
    _, options = begin(tmp_path)
    options.change({name: value})
    later, listed = begin(tmp_path)
    assert values(listed)[name][0] == value and lent(later.config) == lent(given.config) != {}
    assert later.config.host.name == ("tower" if begin is hosting else "") and later.config.stage == given.config.stage
    listed.reload()


def test_a_host_leaves_other_options_of_the_file_to_run(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text('name = "carol"\nthreads = 2\nmemory = "1GB"\n')
    node, _ = hosting(tmp_path)
    assert node.config.host.name == "tower" and node.config.stage.memory_bytes == 10**9
    assert node.config.stage.threads != 2


def values(options: LendingOptions) -> dict[str, tuple[Any, str]]:
    return {row["name"]: (row["value"], row["origin"]) for row in options.listed() if row["value"] != row["default"]}


def test_a_change_is_kept_where_the_option_stands_and_later_starts_have_it(tmp_path: Path) -> None:
    node_file, rules_file = tmp_path / "node.toml", tmp_path / "rules.toml"
    node_file.write_text('# mine\nmax_upload = "8Mbit"\nexclusive = [\n  "steam",\n]\nthreads = 2')
    rules_file.write_text('hours = "22:00-07:00"  # at night\n')
    node, options = running(tmp_path)
    assert values(options) == {
        "max_upload": ("8Mbit", f"file {node_file}"),
        "exclusive": (["steam"], f"file {node_file}"),
        "hours": ("22:00-07:00", f"file {rules_file}"),
    }
    told = options.change(
        {"max_upload": "4Mbit", "exclusive": ["blender"], "hours": "", "days": "mon-fri", "memory": "1GB"}
    )
    assert told == f"Kept in {node_file} and {rules_file} for later starts. Restart the node for memory."
    assert (
        node_file.read_text() == '# mine\nmax_upload = "4Mbit"\nexclusive = ["blender"]\nthreads = 2\nmemory = "1GB"\n'
    )
    assert rules_file.read_text() == 'days = "mon-fri"\n'
    assert node.lending.rules.exclusive == {"blender"} and node.lending.rules.days == {0, 1, 2, 3, 4}
    assert node.lending.rules.hours is None and node.describe()["lends"]["max_upload_bps"] == 4e6
    again, later = running(tmp_path)
    assert again.config.rules == node.lending.rules and values(later) == values(options)
    assert options.change({"memory": "1GB"}) == "Restart the node for memory."


def test_a_flag_wins_at_the_next_start_and_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMNODE_RUN_MAX_LOAD", "50%")
    node, options = running(tmp_path, "--hours", "22:00-07:00", "--max-gpu-temperature", "80")
    assert values(options)["max_load"] == ("50%", "environment SWARMNODE_RUN_MAX_LOAD")
    told = options.change({"hours": "", "max_load": "25%", "max_gpu_temperature": "70"})
    assert told.endswith(
        "This run was started with --hours, --max-load, --max-gpu-temperature: the next start has that again, "
        "unless you leave it out."
    )
    assert node.lending.rules.hours is None and node.lending.rules.max_others_load == 0.25
    assert node._card_limits == CardLimits(max_celsius=70)
    assert values(options) == {
        "max_load": ("25%", "environment SWARMNODE_RUN_MAX_LOAD"),
        "max_gpu_temperature": ("70", "--max-gpu-temperature"),
    }
    options.reload()
    assert node.lending.rules.hours is None, "reading the files again does not undo it"
    assert running(tmp_path, "--hours", "22:00-07:00")[0].config.rules.hours is not None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory": "6"}, "--memory 6: the unit is missing"),
        ({"max_upload": "fast"}, "--max-upload fast: this is not a rate"),
        ({"max_gpu_temperature": "7"}, "--max-gpu-temperature 7: give a number from 30 to 110"),
        ({"max_gpu_temperature": "inf"}, "--max-gpu-temperature inf: give a number"),
        ({"max_load": "0.5"}, "max_load 0.5: this is not a share; write it as 25%"),
        ({"threads": "2"}, "there is no option 'threads' to change"),
        ({"hours": "22:00-07:00\n[x]"}, "hours = "),
    ],
)
def test_what_is_wrong_changes_nothing(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    node, options = running(tmp_path)
    with pytest.raises(UsageError) as refused:
        options.change({"days": "mon-fri", **change})
    assert str(refused.value).startswith(sentence)
    assert not node.lending.rules.any and list(tmp_path.glob("*.toml")) == []


def test_what_the_files_do_not_allow_is_put_back(tmp_path: Path) -> None:
    """A mistake that someone makes in a file meanwhile ends no node and loses no change."""
    node, options = running(tmp_path)
    (tmp_path / "node.toml").write_text('quantize = "int9"\n')
    with pytest.raises(LocalError, match="the options stay as they were"):
        options.change({"hours": "22:00-07:00", "max_upload": "8Mbit"})
    assert (tmp_path / "node.toml").read_text() == 'quantize = "int9"\n' and not (tmp_path / "rules.toml").exists()
    assert not node.lending.rules.any


def test_a_node_without_options_of_its_own_has_rules(tmp_path: Path) -> None:
    node = Node(Swarm(bytes(32), "friends"), build(NodeOptions, {"home": tmp_path}).config())
    options = LendingOptions(tmp_path, node)
    assert "memory" not in {row["name"] for row in options.listed()}
    with pytest.raises(UsageError, match="no option 'memory'"):
        options.change({"memory": "1GB"})
    options.change({"on_mains": True})
    assert node.lending.rules == read_rules(tmp_path) and node.lending.rules.on_mains
    (tmp_path / "rules.toml").write_text("")
    assert options.reload() == "the options were read again" and not node.lending.rules.any
