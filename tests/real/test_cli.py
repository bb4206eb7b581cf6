"""Wrong input at the command line: one clear line, the right exit code, no stack trace."""

from __future__ import annotations

import json
import shutil
import signal
import socket
from pathlib import Path

import pytest

from swarmnode.localswarm import LocalSwarm
from tests.cli.command import assert_clear, swarmnode
from tests.real.conftest import PROMPT, Stages, TinyModel


@pytest.fixture(scope="module")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> LocalSwarm:
    local = LocalSwarm(tmp_path_factory.mktemp("founded"))
    local.invite = local.create(tiny.folder)  # type: ignore[attr-defined]
    return local


def test_create_writes_a_private_file_and_prints_an_invite_alone(founded: LocalSwarm) -> None:
    assert founded.invite.startswith("swarm1") and len(founded.invite.split()) == 1  # type: ignore[attr-defined]
    assert founded.file.stat().st_mode & 0o777 == 0o600
    again = swarmnode("create", str(founded.file.with_suffix("")), "--model", "x", home=founded.folder)
    assert_clear(again, 2, "exists already")


def test_what_is_not_a_swarm_is_refused(tmp_path: Path, founded: LocalSwarm) -> None:
    text = tmp_path / "text.swarm"
    text.write_text("hello")
    damaged = founded.invite[:-3] + "abc"  # type: ignore[attr-defined]
    for source, word in ((str(text), "not a"), (str(tmp_path / "none.swarm"), "no such file"), (damaged, "damaged")):
        assert_clear(swarmnode("status", source, home=tmp_path), 2, word)
        assert_clear(swarmnode("run", source, home=tmp_path), 2, word)


def test_models_that_cannot_be_used_are_refused_before_anything_is_written(tmp_path: Path, tiny: TinyModel) -> None:
    truncated = shutil.copytree(tiny.folder, tmp_path / "truncated")
    with (truncated / "model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    encoder = tmp_path / "t5"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    shutil.copy(tiny.folder / "model.safetensors", encoder)
    for model, exit_code, word in (
        (truncated, 1, "truncated"),
        (encoder, 1, "encoder-decoder"),
        (tmp_path / "nowhere", 2, "no such"),
    ):
        done = swarmnode("create", str(tmp_path / "s"), "--model", str(model), home=tmp_path)
        assert_clear(done, exit_code, word)
        assert not (tmp_path / "s.swarm").exists()


def test_an_unreachable_swarm_is_said_to_be_so(founded: LocalSwarm) -> None:
    arguments = ("generate", founded.invite, "--ids", "1", "--patience", "2")  # type: ignore[attr-defined]
    assert_clear(swarmnode(*arguments, home=founded.folder), 1, "cannot be reached")


def test_a_port_in_use(founded: LocalSwarm, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        done = swarmnode("run", str(founded.file), "--host-maddr", address, home=tmp_path)
    assert_clear(done, 1, address)


@pytest.mark.parametrize("role", ["run", "bootstrap"])
def test_a_port_for_metrics_in_use(founded: LocalSwarm, tmp_path: Path, role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = swarmnode(role, str(founded.file), "--metrics-port", port, home=tmp_path)
    assert_clear(done, 1, port, "in use", "--metrics-port")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "word"),
    [
        (("--span", "3"), 2, "not a span"),
        (("--memory", "lots"), 2, "not a size"),
        (("--host-maddr", "localhost:1"), 2, "multiaddr"),
    ],
)
def test_wrong_options_of_run(founded: LocalSwarm, arguments: tuple[str, ...], exit_code: int, word: str) -> None:
    assert_clear(swarmnode("run", str(founded.file), *arguments, home=founded.folder), exit_code, word)


def test_wrong_options_of_generate(founded: LocalSwarm) -> None:
    for arguments in ((), ("text", "--ids", "1"), ("--ids", "a,b"), ("--ids", "-1")):
        assert swarmnode("generate", str(founded.file), *arguments, home=founded.folder).returncode == 2


@pytest.mark.parametrize(
    ("arguments", "exit_code", "word"),
    [
        (("--span", "3:9"), 2, "units 0 to 5"),
        (("--memory", "1MB"), 1, "not enough"),
        (("--device", "cuda:7"), 1, "no device"),
        (("--dtype", "float8"), 2, "--dtype"),
        (("--quantize", "int2"), 2, "--quantize"),
    ],
)
def test_what_this_machine_or_model_cannot(
    stages: Stages, tmp_path: Path, arguments: tuple[str, ...], exit_code: int, word: str
) -> None:
    assert_clear(swarmnode("run", str(stages.local.file), *arguments, home=tmp_path), exit_code, word)


def test_generate_and_status_for_scripts(stages: Stages, tiny: TinyModel, tmp_path: Path) -> None:
    ids = ",".join(map(str, PROMPT))
    done = swarmnode("generate", str(stages.local.file), "--ids", ids, "-n", "5", "--json", home=tmp_path)
    result = json.loads(done.stdout)
    assert result["ids"] == tiny.alone(PROMPT, 5)
    assert result["text"] is None
    assert [hop["span"] for hop in result["route"]] == [[0, 3], [3, 6]]
    assert {"first_token_s", "seconds", "tokens_per_s", "reroutes"} <= result.keys()
    status = json.loads(swarmnode("status", str(stages.local.file), "--json", home=tmp_path).stdout)
    assert status["covered"] is True and status["units"] == 6
    assert {(peer["name"], tuple(peer["span"])) for peer in status["peers"]} >= {("a1", (0, 3)), ("b2", (3, 6))}
    assert set(status["addresses"]) == {*status["bootstraps"], *(peer["peer"] for peer in status["peers"])}
    wrong = swarmnode("generate", str(stages.local.file), "--ids", "99999", home=tmp_path)
    assert_clear(wrong, 2, "vocabulary")


def test_ctrl_c_twice_leaves_now(stages: Stages) -> None:
    member = stages.nodes["a1"]
    member.kill(signal.SIGINT)
    member.wait_for("draining")
    member.kill(signal.SIGINT)
    assert member.process.wait(10) in (0, 1)
    assert "Traceback" not in member.tail()
