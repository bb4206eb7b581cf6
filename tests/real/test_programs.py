"""The public names of the package, and the examples of docs/python.md, run in their order."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_type_hints

import pytest

import swarmnode
from swarmnode.errors import LocalError, UsageError
from swarmnode.net.identity import hosting_alone
from swarmnode.programs import RunKeywords
from swarmnode.serving.client.generation import GenerateKeywords, GenerateOptions, with_keywords
from swarmnode.swarm.records.run import Run
from swarmnode.swarm.storage.owner_key import is_locked
from tests.gateway.speaking import save_speaking_llama

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


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


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    save_speaking_llama(tmp_path / "my-checkpoint")
    names: dict[str, object] = {}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    printed = capsys.readouterr().out
    assert len(blocks) == 8
    assert "torch.Size([8, " in printed, "a soft prompt has a gradient"
    assert printed.startswith("swarm2")
    assert re.search(r"^2 \d", printed, re.MULTILINE), printed  # the last step of the training
    assert "no-such-swarm" in printed
