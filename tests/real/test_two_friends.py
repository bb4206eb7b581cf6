"""`swarmnode host` in real processes: what two friends type and read, and what the same command does again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from swarmnode.errors import LocalError
from swarmnode.localswarm import LocalSwarm
from swarmnode.net.addressing.addresses import free_port
from tests.browser.chromium import find_chromium
from tests.cli.command import ROOT
from tests.contrib.script import load
from tests.gateway.speaking import save_speaking_llama
from tests.tiny import TinyModel

SCRIPT = ROOT / "contrib" / "benchmarks" / "two_friends.py"


def test_two_friends_come_from_nothing_to_a_chat(tmp_path: Path) -> None:
    if (reason := load(SCRIPT).lacking()) is not None:
        pytest.skip(reason)
    model = tmp_path / "parrot"
    save_speaking_llama(model)
    done = subprocess.run([sys.executable, str(SCRIPT), str(model)], capture_output=True, text=True, timeout=600)
    *read, measured = done.stdout.splitlines()
    told = json.loads(measured)
    assert told["first_token"] and (told["chat"] or find_chromium() is None), done.stderr
    alice = [line.removeprefix("alice | ") for line in read if line.startswith("alice")]
    bob = [line.removeprefix("  bob | ") for line in read if line.startswith("  bob")]
    assert alice[0] == f"swarmnode host {model}"
    after = alice.index("swarmnode join")
    assert alice[after + 1].startswith("swarm2") and "Terminal:   swarmnode chat parrot" in alice
    assert bob[0] == "swarmnode join" and any(line.startswith("Joined parrot: a private swarm") for line in bob)


def test_the_same_command_resumes_with_the_same_invite_and_is_not_run_twice(tiny: TinyModel, tmp_path: Path) -> None:
    with LocalSwarm(tmp_path) as local:
        door, port = f"/ip4/127.0.0.1/tcp/{free_port()}", free_port()
        command = [
            "host",
            str(tiny.folder),
            "--name",
            str(tmp_path / "friends"),
            "--listen",
            door,
            "--port",
            str(port),
            "--json",
        ]
        first = local.start("alice", command)
        invite = first.wait_for("hosting")["invite"]
        served = first.wait_for("serving")
        assert served["url"] == f"http://127.0.0.1:{port}/v1" and served["page"].startswith(f"http://127.0.0.1:{port}/")
        models = httpx2.get(f"{served['url']}/models", timeout=None).json()
        assert [model["id"] for model in models["data"]] == ["friends"]
        with pytest.raises(LocalError, match=f"hosted here already, by process {first.pid}:"):
            local.command(*command, "--home", str(first.home), timeout_s=60.0)
        first.stop()
        again = local.start("alice", command)
        assert again.wait_for("hosting")["invite"] == invite
        again.wait_for("ready")
