"""`swarmnode join`, and commands about the swarm that was used last."""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import datetime
from pathlib import Path

import pytest

from swarmnode.cli.options.swarm import open_swarm
from swarmnode.lending.control import ControlServer
from swarmnode.lending.lending import Lending
from swarmnode.swarm.storage.chunk_folder import folder_name
from swarmnode.swarm.storage.remembered import own_name
from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_swarm
from tests.cli.command import assert_clear, invoke
from tests.cli.test_owner import file, founded  # noqa: F401  # a fixture
from tests.swarm.storage.test_joined_swarms import FRIENDS


def test_a_joined_swarm_is_the_default(tmp_path: Path) -> None:
    done = invoke("join", FRIENDS, "--home", str(tmp_path))
    assert done.returncode == 0 and "swarmnode run friends" in done.stdout
    assert open_swarm("", tmp_path).name == open_swarm("friends", tmp_path).name == "friends"


@pytest.mark.parametrize("way", ["file", "standard input"])
def test_an_invite_need_not_stand_in_the_command(tmp_path: Path, way: str) -> None:
    line = tmp_path / "line.txt"
    line.write_text(f"{FRIENDS}\n")
    argument, given = (str(line), None) if way == "file" else ("-", f"{FRIENDS}\n")
    done = invoke("join", argument, "--home", str(tmp_path / "home"), "--json", given=given)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "friends"


def test_what_host_prints_can_be_pasted_whole(tmp_path: Path) -> None:
    done = invoke("join", "--home", str(tmp_path), "--json", given=f"swarmnode join\n{FRIENDS}\n")
    assert done.returncode == 0 and json.loads(done.stdout)["name"] == "friends", done.stderr


def test_a_private_swarms_terms_are_told(file: Path, tmp_path: Path) -> None:  # noqa: F811
    line = invoke("invite", str(file), "--role", "client", "--uses", "3", "--expires", "never").stdout.strip()
    done = invoke("join", line, "--home", str(tmp_path / "home"), "--as", "club")
    assert "will show whether the swarm answers" in done.stdout
    assert "as client for ever, for 3 machines" in done.stdout and "swarmnode run" not in done.stdout
    assert JoinedSwarms(tmp_path / "home").names() == ["club"]


@pytest.mark.parametrize(
    ("typed", "asked", "named"),
    [
        ((), None, "tower"),  # in a pipe
        (("--name", "Carol"), None, "Carol"),
        ((), "Carol\n", "Carol"),
        ((), "\n", "tower"),
    ],
)
def test_a_person_has_one_name(
    file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    typed: tuple[str, ...],
    asked: str | None,
    named: str,
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "tower.example.org")
    monkeypatch.setattr("swarmnode.cli.use.join.is_piped", lambda: asked is None)
    line, home = invoke("invite", str(file)).stdout.strip(), tmp_path / "home"
    done = invoke("join", line, *typed, home=home, given=asked)
    assert done.returncode == 0 and f"Others see this machine as {named}." in done.stdout, done.stderr
    assert ("Your name, as others see it [tower]" in done.stderr) == (asked is not None)
    assert own_name(home) == named
    again = invoke("join", line, home=home, given="Another\n")
    assert own_name(home) == named and "Your name" not in again.stderr, "it is asked once"
    assert_clear(invoke("join", line, "--name", "x" * 33, home=home), 2, "at most 32")


def test_strangers_and_clients_learn_no_name_unasked(file: Path, tmp_path: Path) -> None:  # noqa: F811
    invoke("join", FRIENDS, home=tmp_path / "one")
    client = invoke("invite", str(file), "--role", "client").stdout.strip()
    invoke("join", client, home=tmp_path / "two")
    assert own_name(tmp_path / "one") == own_name(tmp_path / "two") == ""


@pytest.mark.parametrize("content", [b"\xff\n", b"x" * 500, b"a\x1bb\n", b""])
def test_a_damaged_name_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "name").write_bytes(content)
    assert own_name(tmp_path) == ""


@pytest.mark.parametrize(("life", "shown"), [("10m", "%Y-%m-%d %H:%M"), ("7d", "%Y-%m-%d.")])
def test_the_time_of_day_is_told_of_an_end_that_is_near(file: Path, tmp_path: Path, life: str, shown: str) -> None:  # noqa: F811
    given = json.loads(invoke("invite", str(file), "--uses", "0", "--expires", life, "--json").stdout)
    done = invoke("join", given["invite"], "--home", str(tmp_path / "home"))
    assert f"until {datetime.fromtimestamp(given['expires_at']).strftime(shown)}" in done.stdout


def test_an_invite_that_has_expired_is_refused(
    file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = json.loads(invoke("invite", str(file), "--expires", "1h", "--json").stdout)
    monkeypatch.setattr(time, "time", lambda: float(given["expires_at"]))
    when = f"{datetime.fromtimestamp(given['expires_at']):%Y-%m-%d %H:%M}"
    for as_json in ((), ("--json",)):
        done = invoke("join", given["invite"], "--home", str(tmp_path / "home"), *as_json)
        assert_clear(done, 2, " expired at ", when, "ask its owner")
    assert not done.stdout and not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("text", "word"), [("hello", "neither an invite"), (FRIENDS[:-4] + "aaaa", "damaged"), ("", "standard input")]
)
def test_what_is_no_invite_is_refused(tmp_path: Path, text: str, word: str) -> None:
    done = invoke("join", text, "--home", str(tmp_path), given="")
    assert done.returncode == 2 and word in done.stderr and not list(tmp_path.iterdir())


def test_without_any_swarm_it_is_asked_which(tmp_path: Path) -> None:
    assert_clear(invoke("status", "--home", str(tmp_path)), 2, "which swarm?")
    assert_clear(invoke("generate", "Once upon a time", "--home", str(tmp_path)), 2, "which swarm?")


def test_leaving_undoes_joining(tmp_path: Path) -> None:
    invoke("join", FRIENDS, home=tmp_path)
    swarm = load_swarm(FRIENDS).id
    member, other = (tmp_path / "membership" / f"{key}-5TqWZRpY.json" for key in (swarm.hex()[:16], "ab" * 8))
    weights = tmp_path / "weights" / folder_name(swarm)
    for folder in (member.parent, weights):
        folder.mkdir(parents=True)
    member.touch(), other.touch()
    done = invoke("leave", "friends", home=tmp_path)
    assert done.returncode == 0 and "your membership" in done.stdout
    assert f"swarmnode models prune {weights.name}" in done.stdout and weights.is_dir()
    assert not member.exists() and other.exists() and JoinedSwarms(tmp_path).names() == []
    assert_clear(invoke("status", home=tmp_path), 2, "which swarm?")
    assert_clear(invoke("leave", "friends", home=tmp_path), 2, "no swarm is called friends")


def test_a_membership_stays_while_the_swarm_has_another_name(tmp_path: Path) -> None:
    invoke("join", FRIENDS, home=tmp_path)
    invoke("join", FRIENDS, "--as", "club", home=tmp_path)
    member = tmp_path / "membership" / f"{load_swarm(FRIENDS).id.hex()[:16]}-5TqWZRpY.json"
    member.parent.mkdir()
    member.touch()
    assert json.loads(invoke("leave", "club", "--json", home=tmp_path).stdout)["memberships"] == 0 and member.exists()


def test_a_founders_file_stays(file: Path, tmp_path: Path) -> None:  # noqa: F811
    JoinedSwarms(tmp_path / "home").remember_file(file)
    done = invoke("leave", "friends", home=tmp_path / "home")
    assert str(file) in done.stdout and file.exists()


async def test_a_swarm_with_a_running_node_is_not_left(tmp_path: Path) -> None:
    JoinedSwarms(tmp_path).remember(FRIENDS)
    told = {"swarm_id": load_swarm(FRIENDS).id.hex()}
    server = ControlServer(Lending(), asyncio.Event(), lambda: told)
    async with server.listening(tmp_path, "friends"):
        done = await asyncio.to_thread(invoke, "leave", "friends", "--home", str(tmp_path))
    assert_clear(done, 1, f"process {os.getpid()}", "swarmnode stop")
    assert JoinedSwarms(tmp_path).names() == ["friends"]


def test_the_owners_commands_know_the_name(
    file: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    JoinedSwarms(tmp_path / "home").remember_file(file)
    monkeypatch.chdir(tmp_path / "home")
    assert_clear(invoke("invite", "freinds", home=tmp_path / "home"), 2, "did you mean friends?")
    done = invoke("invite", "friends", home=tmp_path / "home")
    assert done.returncode == 0 and load_swarm(done.stdout.strip()).id == load_swarm(file).id
