"""The command line where there is a swarm, or should be: what it prints, and one clear line with the right exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from swarmnode.localswarm import STOP_TIMEOUT_S
from tests.cli.command import assert_clear
from tests.real.conftest import Stages
from tests.real.forked import ForkedSwarm, run_command
from tests.tiny import PROMPT, TinyModel


def swarmnode(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return run_command(arguments, {**os.environ, "SWARMNODE_HOME": str(home)})


@pytest.fixture(scope="module")
def founded(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> ForkedSwarm:
    local = ForkedSwarm(tmp_path_factory.mktemp("founded"))
    local.invite = local.create(tiny.folder)  # type: ignore[attr-defined]
    return local


def test_an_unreachable_swarm_is_said_to_be_so(founded: ForkedSwarm) -> None:
    arguments = ("generate", founded.invite, "--ids", "1", "--patience", "2")  # type: ignore[attr-defined]
    assert_clear(swarmnode(*arguments, home=founded.folder), 1, "cannot be reached")


def test_a_port_in_use(founded: ForkedSwarm, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
        done = swarmnode("run", str(founded.file), "--host-maddr", address, home=tmp_path)
    assert_clear(done, 1, address)


@pytest.mark.parametrize("role", ["run", "host --door-only"])
def test_a_port_for_metrics_in_use(founded: ForkedSwarm, tmp_path: Path, role: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        done = swarmnode(*role.split(), str(founded.file), "--metrics-port", port, home=tmp_path)
    assert_clear(done, 1, port, "in use", "--metrics-host", "another address or port")


def test_what_the_model_has_not(stages: Stages, tmp_path: Path) -> None:
    assert_clear(swarmnode("run", str(stages.local.file), "--span", "3:9", home=tmp_path), 2, "layers 0 to 5")


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
    assert status["max_model_len"] == json.loads((tiny.folder / "config.json").read_text())["max_position_embeddings"]
    assert {(peer["name"], tuple(peer["span"])) for peer in status["peers"]} >= {("a1", (0, 3)), ("b2", (3, 6))}
    assert set(status["addresses"]) == {*status["bootstraps"], *(peer["peer"] for peer in status["peers"])}
    wrong = swarmnode("generate", str(stages.local.file), "--ids", "99999", home=tmp_path)
    assert_clear(wrong, 2, "vocabulary")


def test_ctrl_c_twice_leaves_now(stages: Stages) -> None:
    member = stages.nodes["a1"]
    member.kill(signal.SIGINT)
    member.wait_for("draining")
    member.kill(signal.SIGINT)
    assert member.finish(STOP_TIMEOUT_S) in (0, 1)
    assert "Traceback" not in member.tail()


def test_a_receipt_is_written_and_verified(tiny: TinyModel, tmp_path: Path) -> None:
    """Three machines of one class: two of them prove what the third one computed, one alone proves nothing."""
    with ForkedSwarm(tmp_path) as local:
        local.create(tiny.folder, "--equal-bits")
        local.bootstrap()
        nodes = [local.node(name, "--span", "0:6") for name in ("a", "b", "c")]
        for member in nodes:
            member.wait_for("ready")
        home, receipt, ids = tmp_path / "user", tmp_path / "story.receipt", ",".join(map(str, PROMPT))
        ordered = ("generate", str(local.file), "--ids", ids, "-n", "8", "--receipt")
        done = swarmnode(*ordered, str(receipt), home=home)
        assert done.returncode == 0 and "swarmnode verify" in done.stderr
        assert_clear(swarmnode(*ordered, str(tmp_path), home=home), 2, str(tmp_path))
        verified = swarmnode("verify", str(receipt), str(local.file), "--json", home=home)
        (hop,) = json.loads(verified.stdout)["hops"]
        assert verified.returncode == 0 and {hop["peer"], *hop["by"]} == {member.peer for member in nodes}
        next(member for member in nodes if member.peer != hop["peer"]).kill()
        late = swarmnode("verify", str(receipt), str(local.file), home=home)
        assert late.returncode == 1 and "not proved" in late.stdout
        local.stop()  # not even the bootstrap peer is there: files are told apart all the same
        receipt.write_bytes(receipt.read_bytes()[:-1])
        assert_clear(swarmnode("verify", str(receipt), str(local.file), home=home), 2, "damaged")
