"""`swarmnode service` and `swarmnode models weights`: what is written, and what is left alone."""

from __future__ import annotations

import json
import os
import plistlib
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from swarmnode.cli.lend.service import commands, service
from swarmnode.cli.lend.service.managers import UNIT, Launchd, ScheduledTask, Systemd, unit_text
from swarmnode.swarm.records.invite import decode_invite
from swarmnode.swarm.storage.chunk_folder import WeightCache
from tests.cli.command import assert_clear, invoke
from tests.cli.test_launch import hostile_names
from tests.swarm.storage.test_joined_swarms import FRIENDS


@pytest.fixture
def called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the system is told, instead of telling it: that all is well."""
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(service, "TIMEOUT_S", 5.0)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        told.append(tuple(words))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(service.subprocess, "run", run)
    monkeypatch.delenv("WSL_DISTRO_NAME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("SWARMNODE_HOME", str(tmp_path / "home"))
    return told


def test_a_service_is_installed_and_removed(tmp_path: Path, called: list[tuple[str, ...]]) -> None:
    assert invoke("join", FRIENDS).returncode == 0
    done = invoke("service", "install", "friends", "--memory", "6GB", "--name", "alice's")
    assert done.returncode == 0, done.stderr
    invite, options = tmp_path / "config/swarmnode/friends.swarm", tmp_path / "config/swarmnode/friends.conf"
    unit = tmp_path / "config/systemd/user" / UNIT
    assert invite.read_text().strip() == FRIENDS and stat.S_IMODE(invite.stat().st_mode) == 0o600
    assert "--memory 6GB" in options.read_text() and "ExecStart=/" in unit.read_text() and "%h" not in unit.read_text()
    assert called == [
        ("systemctl", "--user", "daemon-reload"),
        ("systemctl", "--user", "enable", "swarmnode@friends"),
        ("systemctl", "--user", "restart", "swarmnode@friends"),
    ]
    assert invoke("service", "uninstall", "friends").returncode == 0
    assert not any(path.exists() for path in (invite, options, unit))
    for command in ("uninstall", "status", "logs"):
        assert_clear(invoke("service", command, "friends"), 2, "no service friends")


def test_a_service_is_removed_without_a_user_bus(
    tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `su` each call of systemctl fails; in a container there is no systemctl."""
    for there in (True, False):
        assert invoke("join", FRIENDS).returncode == 0
        assert invoke("service", "install", "friends", "--no-start").returncode == 0
        units = tmp_path / "config/systemd/user"
        link = units / "default.target.wants/swarmnode@friends.service"
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(units / UNIT)
        with monkeypatch.context() as patch:
            patch.setattr(service.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1))
            if not there:
                patch.setattr(shutil, "which", lambda name: None)
            done = invoke("service", "uninstall", "friends")
        assert done.returncode == 0 and "`swarmnode stop` ends it" in done.stderr
        assert not [path for path in (tmp_path / "config").rglob("*") if not path.is_dir() or path.is_symlink()]


def test_what_starts_a_written_service_is_told(
    tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert invoke("join", FRIENDS).returncode == 0
    told = invoke("service", "install", "friends", "--no-start").stdout
    assert "  systemctl --user enable swarmnode@friends\n" in told and not called
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    told = invoke("service", "install", "friends", "--no-start").stdout
    assert f"  launchctl bootstrap gui/{os.getuid()} " in told and not called


def test_logs_are_of_the_only_service_or_it_is_told_where_they_are(
    tmp_path: Path, called: list[tuple[str, ...]]
) -> None:
    assert "its own terminal" in invoke("logs").stdout
    for name in ("friends", "club"):
        assert invoke("join", FRIENDS, "--as", name).returncode == 0
        assert invoke("service", "install", name).returncode == 0
        assert invoke("logs", "--follow", name).returncode == 0 and f"--unit=swarmnode@{name}" in called[-1]
    assert_clear(invoke("logs"), 2, "club, friends")
    assert_clear(invoke("logs", "others"), 2, "no service others")
    assert invoke("service", "uninstall", "club").returncode == 0
    assert invoke("logs").returncode == 0 and "--unit=swarmnode@friends" in called[-1]


def test_a_service_of_macos(tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert invoke("join", FRIENDS).returncode == 0
    done = invoke("service", "install", "friends", "--memory", "6GB")
    assert done.returncode == 0, done.stderr
    agent = tmp_path / "user/Library/LaunchAgents/org.swarmnode.friends.plist"
    told = plistlib.loads(agent.read_bytes())
    swarm = tmp_path / "config/swarmnode/friends.swarm"
    home = ["--home", str(tmp_path / "home")]  # of SWARMNODE_HOME, which the service will not have
    assert told["ProgramArguments"] == ["/usr/bin/swarmnode", "run", str(swarm), "--json", "--memory", "6GB", *home]
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert Path(told["StandardErrorPath"]).parent.is_dir()
    domain = f"gui/{os.getuid()}"
    assert called[-1] == ("launchctl", "bootstrap", domain, str(agent))
    assert invoke("service", "logs", "friends", "-f").returncode == 0 and called[-1][:4] == ("tail", "-n", "100", "-f")
    assert invoke("service", "uninstall", "friends").returncode == 0
    assert called[-1] == ("launchctl", "bootout", f"{domain}/org.swarmnode.friends")
    assert not agent.exists() and not swarm.exists()


def test_a_service_with_the_usual_home_is_not_told_of_it(
    tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWARMNODE_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert invoke("join", FRIENDS).returncode == 0
    assert invoke("service", "install", "friends", "--no-start").returncode == 0
    assert (tmp_path / "config/swarmnode/friends.conf").read_text() == 'OPTIONS=""\n' and not called


def test_a_service_of_windows_for_wsl(
    tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WSL_DISTRO_NAME", "Debian")
    monkeypatch.setattr(commands, "SYSTEMD", tmp_path / "none")
    assert invoke("join", FRIENDS).returncode == 0
    done = invoke("service", "install", "friends", "--name", "alice's")
    assert done.returncode == 0, done.stderr
    script = tmp_path / "config/swarmnode/friends.sh"
    with subprocess.Popen(["sh", "-n", script]) as checked:
        assert checked.wait() == 0
    assert stat.S_IMODE(script.stat().st_mode) == 0o700
    node = """'alice'"'"'s'"""  # as a shell reads it
    assert f"--name {node}" in script.read_text() and f"exec /usr/bin/swarmnode stop {node}" in script.read_text()
    assert [words[:2] for words in called] == [("schtasks.exe", "/Create"), ("schtasks.exe", "/Run")]
    assert called[0][-1] == f"wsl.exe -d Debian -e {script}"
    assert invoke("service", "status", "friends").returncode == 0 and called[-1][1] == "/Query"
    assert invoke("service", "uninstall", "friends").returncode == 0
    assert called[-2] == (str(script), "stop") and called[-1][1] == "/Delete"
    assert not script.exists()


def test_windows_itself_is_told_where_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Windows")
    assert_clear(invoke("status", FRIENDS), 2, "WSL 2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("friends", "--memry", "6GB"), "--memry"),
        (("my friends",), "cannot be a service's name"),
        (("nobody",), "nobody"),
    ],
)
def test_nothing_is_installed_of_what_would_not_run(
    tmp_path: Path, called: list[tuple[str, ...]], arguments: tuple[str, ...], words: str
) -> None:
    assert invoke("join", FRIENDS).returncode == 0
    done = invoke("service", "install", *arguments)
    assert done.returncode == 2 and words in done.stderr
    assert not (tmp_path / "config").exists() and not called


def test_fetched_weights_are_listed_and_pruned(tmp_path: Path) -> None:
    invoke("join", FRIENDS, home=tmp_path)
    used = WeightCache(tmp_path / "weights", decode_invite(FRIENDS).swarm_id)
    old = WeightCache(tmp_path / "weights", b"x" * 32)
    for cache, size_bytes in ((used, 300_000), (old, 2000)):
        (cache.folder / "model.safetensors").write_bytes(bytes(size_bytes))
    old.close()
    os.utime(old.folder, (1, 1))
    listed = json.loads(invoke("models", "weights", "--json", home=tmp_path).stdout)
    assert [one["swarm"] for one in listed] == ["friends", old.folder.name]
    assert "friends" in invoke("models", "weights", home=tmp_path).stdout
    assert "in use" in invoke("models", "prune", "friends", home=tmp_path).stdout and used.folder.exists()
    assert "freed" in invoke("models", "prune", "--unused", "30d", home=tmp_path).stdout and not old.folder.exists()
    used.close()
    assert invoke("models", "prune", home=tmp_path).returncode == 0 and not used.folder.exists()
    assert "No weights" in invoke("models", "weights", home=tmp_path / "new").stdout


def variables(text: str) -> dict[str, str]:
    """A file of variables in double quotes, as systemd reads it (src/basic/env-file.c)."""
    name, _, value = text.removesuffix("\n").partition("=")
    assert "\n" not in text.removesuffix("\n")
    if not value.startswith('"'):
        assert not set(value) & set("\"'\\ ")
        return {name: value}
    return {name: re.sub(r'\\(["\\`$])', r"\1", re.fullmatch(r'"((?:[^"\\]|\\.)*)"', value)[1])}


def words_of(text: str) -> list[str]:
    """The words of $OPTIONS or of ExecStart, as systemd splits them: both kinds of quotes and backslashes."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|([^\s"\'\\]+)', text)
    assert " ".join(bare or f'"{quoted}"' for quoted, bare in found) == text
    return [bare or re.sub(r"\\(.)", r"\1", quoted) for quoted, bare in found]


def test_options_reach_the_node_as_they_were_typed(
    tmp_path: Path, called: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = hostile_names()
    (tmp_path / "config/swarmnode").mkdir(parents=True)
    asked = service.Service("friends", tuple(options), home=tmp_path / "a $(touch x) %h 'home'")
    [_, file] = Systemd().write(asked)
    assert words_of(variables(file.read_text())["OPTIONS"]) == asked.all_options
    for program in ("/opt/my programs/swarmnode", '/opt/100%h/$HOME/a"b\\c/swarmnode'):
        monkeypatch.setattr(shutil, "which", lambda _, program=program: program)
        line = next(line for line in unit_text().splitlines() if line.startswith("ExecStart="))
        assert words_of(line.removeprefix("ExecStart="))[0].replace("%%", "%") == program
        agent = plistlib.loads(Launchd().write(asked)[0].read_bytes())
        assert agent["ProgramArguments"] == asked.command
    with monkeypatch.context() as patch:
        patch.setenv("WSL_DISTRO_NAME", "My Debian")
        [script] = ScheduledTask().write(asked)
        text = script.read_text().replace("nice -n 10 ", "printf '%s\\0' ").replace("exec >>", ": ")
        with subprocess.Popen(["sh", "-c", text], stdout=subprocess.PIPE, cwd=tmp_path) as shell:
            told = shell.communicate(timeout=20)[0]
        assert told.decode().split("\0")[:-1] == asked.command and not (tmp_path / "pwned").exists()
        assert ScheduledTask().start_commands(asked)[0][-1].startswith('wsl.exe -d "My Debian" -e ')


def test_an_option_with_a_control_character_is_refused(called: list[tuple[str, ...]]) -> None:
    assert invoke("join", FRIENDS).returncode == 0
    for option in ("a\nb", "\x1b[2J", "\u202e"):
        assert_clear(invoke("service", "install", "friends", "--group", option), 2, "control character")
