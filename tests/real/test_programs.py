"""The public names of the package, and the examples in Python of its pages, run in their order."""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from itertools import compress
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import swarmnode
from swarmnode.errors import LocalError, NetworkDown, UsageError
from swarmnode.files import home_folder
from swarmnode.lending.lending import Rules
from swarmnode.net.identity import hosting_alone
from swarmnode.programs import RunKeywords
from swarmnode.serving.client.generation import GenerateKeywords, GenerateOptions, with_keywords
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.owner_files import is_locked
from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_swarm
from tests.cli.command import invoke
from tests.gateway.speaking import save_speaking_llama
from tests.swarm.storage.test_joined_swarms import FRIENDS

README = Path(__file__).parents[2] / "README.md"
PYTHON = README.parent / "docs" / "python.md"


def python_blocks(page: Path) -> list[str]:
    """Return the blocks of Python code of a page."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_every_public_name_is_there_and_typed() -> None:
    tree = ast.parse(Path(swarmnode.__file__).read_text())
    typed = {
        name.asname or name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }
    assert set(swarmnode.__all__) == typed - {"annotations", "TYPE_CHECKING", "Any"}
    for name in swarmnode.__all__:
        assert getattr(swarmnode, name) is not None
    assert set(swarmnode.__all__) <= set(dir(swarmnode))
    assert (Path(swarmnode.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError, match="nonsense"):
        swarmnode.nonsense  # noqa: B018


def test_keywords_are_the_fields_of_the_settings() -> None:
    assert set(GenerateKeywords.__annotations__) == {"max_tokens", "stop", *GenerateOptions.__dataclass_fields__}
    assert set(RunKeywords.__annotations__) == set(Run.__struct_fields__) - {"data", "steps", "label_weights"}
    assert get_type_hints(swarmnode.SyncSwarm.close)["return"] is type(None)


def test_keywords_replace_fields_and_are_checked() -> None:
    options, stops = with_keywords(GenerateOptions(temperature=0.5), {"max_tokens": 3, "stop": "END"})
    assert (options.max_new_tokens, options.temperature, stops) == (3, 0.5, ("END",))
    with pytest.raises(UsageError, match="the same"):
        with_keywords(None, {"max_tokens": 3, "max_new_tokens": 4})
    with pytest.raises(TypeError, match="max_token'"):
        with_keywords(None, {"max_token": 3})  # type: ignore[typeddict-unknown-key]
    with pytest.raises(UsageError, match="stop"):
        with_keywords(None, {"stop": ["x"] * 17})


def test_a_message_of_another_shape_is_refused() -> None:
    from swarmnode.client.tokenizer import Turn, turn_of

    assert turn_of({"role": "user", "content": "hi"}) == turn_of(Turn("user", "hi"))
    for wrong in (
        {"role": "user"},
        {"role": "user", "content": 3},
        "hi",
        {"role": "user", "content": "x", "name": "y"},
    ):
        with pytest.raises(UsageError, match="role"):
            turn_of(wrong)  # type: ignore[arg-type]


def test_a_private_swarm_is_hosted_once_and_its_key_may_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    save_speaking_llama(tmp_path / "model")
    swarm = swarmnode.create(tmp_path / "model", tmp_path / "locked", password="correct horse")
    assert swarm.private and is_locked(tmp_path / "locked.owner")
    with pytest.raises(UsageError, match="password is wrong"):
        swarmnode.host(swarm, password="guess")
    config = swarmnode.NodeConfig()
    with hosting_alone(config.host.home, swarm.id, swarm.name), pytest.raises(LocalError, match="hosted here already"):
        swarmnode.host(swarm, config, password="correct horse")
    assert not swarmnode.create(tmp_path / "model", tmp_path / "plain", membership="open").owner


FRIEND = """
import json, sys
names = {}
for block in json.load(sys.stdin):
    exec(compile(block, "python.md", "exec"), names)
"""


def test_the_examples_of_the_pages_run_for_the_founder_and_for_a_friend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The friend has a home and a folder of its own, and has only joined; it trains before the founder, who sees the end."""
    founder, friend = tmp_path / "founder", tmp_path / "friend"
    for folder in (founder, friend):
        folder.mkdir()
    monkeypatch.chdir(founder)
    monkeypatch.setenv("SWARMNODE_HOME", str(founder / "home"))
    save_speaking_llama(founder / "my-checkpoint")
    blocks = [block for page in (PYTHON, README) for block in python_blocks(page)]
    founds = [any(word in block for word in ("create(", "host(")) for block in blocks]
    assert (len(blocks), sum(founds)) == (10, 2)
    names: dict[str, Any] = {}
    for block in compress(blocks, founds):
        exec(compile(block, str(PYTHON), "exec"), names)
    for_trainer = invoke("invite", "school", "--role", "trainer").stdout.split()[-1]
    for invite in (names["hosted"].invite, for_trainer):
        joined = invoke("join", home=friend / "home", cwd=friend, given=invite)
        assert joined.returncode == 0, joined.stderr
    of_all = [block for block, only_founder in zip(blocks, founds, strict=True) if not only_founder]
    done = subprocess.run(
        [sys.executable, "-c", FRIEND],
        input=json.dumps(of_all),
        env={**os.environ, "SWARMNODE_HOME": str(friend / "home")},
        cwd=friend,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    for block in of_all:
        exec(compile(block, str(PYTHON), "exec"), names)
    names["hosted"].close()
    names["school_host"].close()
    for printed in (capsys.readouterr().out, done.stdout):
        assert "torch.Size([8, " in printed, "a soft prompt has a gradient"
        assert "no-such-swarm" in printed
    assert re.search(r"^2 \d", done.stdout, re.MULTILINE), done.stdout  # the last step of the training


@pytest.mark.parametrize("settings", [swarmnode.StageConfig, swarmnode.HostConfig, Rules])
def test_sizes_and_rates_may_be_written_as_in_the_commands(settings: Any) -> None:
    quantities = [name for name in settings.__dataclass_fields__ if name.endswith(("_bytes", "_bps"))]
    assert quantities
    for name in quantities:
        text, number = ("300MB", 300_000_000) if name.endswith("_bytes") else ("8Mbit", 8e6)
        given = settings(**{name: text})
        assert getattr(given, name) == number and given == settings(**{name: number}) == replace(given)
        assert getattr(settings(), name) is None and pickle.loads(pickle.dumps(given)) == given
        with pytest.raises(UsageError, match=f"{name} 300: the unit is missing"):
            settings(**{name: "300"})
        with pytest.raises(FrozenInstanceError):
            setattr(given, name, number)


def test_python_knows_the_names_that_the_commands_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Joined, founded and public names, with the home of the environment, the platform's, and one that is given."""
    home, given = tmp_path / "home", tmp_path / "given"
    monkeypatch.delenv("SWARMNODE_HOME", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home_folder() == tmp_path / "data" / "swarmnode" and home_folder("~/given") == given
    for folder in (home_folder(), home, given):
        name = f"of-{folder.name}"
        JoinedSwarms(folder).remember(FRIENDS, name)
        if folder == home:
            monkeypatch.setenv("SWARMNODE_HOME", str(home))
        where = {"home": "~/given"} if folder == given else {}
        config = swarmnode.NodeConfig(swarmnode.HostConfig(home=folder)) if where else swarmnode.NodeConfig()
        assert swarmnode.Node(name, config).swarm.id == load_swarm(FRIENDS).id
        (tmp_path / "text.txt").write_text("text")
        events = swarmnode.train(name, tmp_path / "text.txt", steps=1, patience_s=0.1, **where)
        for use in (lambda: swarmnode.connect(name, patience_s=0.1, **where), lambda: next(events)):  # noqa: B023
            with pytest.raises(NetworkDown):
                use()
        with pytest.raises(UsageError, match=f"did you mean {name}"):
            swarmnode.connect(f"{name}s", **where)
