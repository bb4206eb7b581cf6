"""`swarmnode models`, and help in groups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarmnode.cli.main import app
from swarmnode.swarm.records.adapter_record import Share
from swarmnode.swarm.records.manifest import encode_manifest, swarm_id
from swarmnode.swarm.storage.own_adapters import AdapterTerms, OwnAdapters
from swarmnode.swarm.storage.remembered import ManifestCache
from swarmnode.swarm.storage.swarmfile import JoinedSwarms, load_swarm, new_swarm
from tests.cli.command import assert_clear, invoke
from tests.cli.test_owner import founded
from tests.swarm.records.test_manifest import make_manifest
from tests.swarm.storage.test_joined_swarms import FRIENDS


def test_known_swarms_are_listed_with_what_was_seen_of_them(tmp_path: Path) -> None:
    assert "swarmnode join" in invoke("models", home=tmp_path).stdout
    raw = encode_manifest(make_manifest())
    joined = JoinedSwarms(tmp_path)
    joined.remember(new_swarm(raw).invite, "seen")
    joined.used(joined.remember(FRIENDS))
    ManifestCache(tmp_path).store(raw)
    listed = {one["name"]: one for one in json.loads(invoke("models", "--json", home=tmp_path).stdout)}
    assert listed["friends"]["last"] and listed["friends"]["units"] is None
    assert listed["seen"]["units"] == make_manifest().model.units and listed["seen"]["task"] == "generate"
    assert "not seen yet" in invoke("models", home=tmp_path).stdout


def test_a_damaged_manifest_is_not_taken(tmp_path: Path) -> None:
    raw, cache = encode_manifest(make_manifest()), ManifestCache(tmp_path)
    cache.store(raw)
    assert cache.get(swarm_id(raw)) == raw
    next((tmp_path / "manifests").iterdir()).write_bytes(raw[:-1])
    assert cache.get(swarm_id(raw)) is None


def test_a_home_that_cannot_be_written_costs_no_more_than_a_fetch(tmp_path: Path) -> None:
    (tmp_path / "manifests").write_text("no folder")
    cache = ManifestCache(tmp_path)
    cache.store(encode_manifest(make_manifest()))
    assert cache.get(b"x" * 32) is None


def test_names_are_shown_in_full_however_narrow_the_terminal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a-swarm-of-many-friends-and-of-their-friends"
    JoinedSwarms(tmp_path).remember(FRIENDS, name)
    monkeypatch.setenv("COLUMNS", "60")
    shown = invoke("models", home=tmp_path).stdout
    assert name in shown and "…" not in shown
    assert invoke("list", "--json", home=tmp_path).stdout == invoke("models", "--json", home=tmp_path).stdout


def test_a_founders_swarm_is_listed_and_one_without_its_file_is_told(tmp_path: Path) -> None:
    file = founded(tmp_path)
    JoinedSwarms(tmp_path / "home").remember_file(file)
    [listed] = json.loads(invoke("models", "--json", home=tmp_path / "home").stdout)
    assert listed["name"] == "friends" and listed["members"] == "yours" and listed["last"] and listed["units"]
    file.unlink()
    [listed] = json.loads(invoke("models", "--json", home=tmp_path / "home").stdout)
    assert str(file) in listed["model"] and "gone" in listed["model"]


@pytest.mark.parametrize("words", ["status", "leave", "serve", "doctor", "why --swarm", "credit", "chat"])
def test_a_shell_completes_swarms(tmp_path: Path, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("friends", "frisbee", "club"):
        JoinedSwarms(tmp_path).remember(FRIENDS, name)
    typed = words.split()[-2:] if "--" in words else words.split()[-1:]
    assert _completed(monkeypatch, tmp_path, *typed, "fri") == ["friends", "frisbee"]


def test_a_shell_completes_adapters_of_this_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    JoinedSwarms(tmp_path).remember(FRIENDS, "friends")
    swarm = JoinedSwarms(tmp_path).names()[0]
    own = OwnAdapters(tmp_path, load_swarm(swarm, tmp_path).id)
    folder = tmp_path / "verse"
    folder.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).write_bytes(b"{}")
    own.add(folder, AdapterTerms("verse", Share.PRIVATE, 1 << 40, 8))
    assert _completed(monkeypatch, tmp_path, "adapter", "remove", "friends", "v") == ["verse"]
    assert _completed(monkeypatch, tmp_path, "generate", "friends", "--adapter", "v") == ["verse"]
    assert _completed(monkeypatch, tmp_path, "generate", "unknown", "--adapter", "v") == []


def _completed(monkeypatch: pytest.MonkeyPatch, home: Path, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    monkeypatch.setenv("_SWARMNODE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", " ".join(("swarmnode", *words)))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWARMNODE_HOME", str(home))
        done = CliRunner().invoke(app, [], prog_name="swarmnode")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("status", "zzz"), "known here: friends"),
        (("leave", "zzz"), "known here: friends"),
        (("modles",), "did you mean `swarmnode models`?"),
        (("models", "--jso"), "did you mean --json?"),
        (("service", "isntall", "x"), "`swarmnode service install`"),
        (("status", "freinds"), "did you mean friends?"),
        (("leave", "Freinds"), "did you mean friends?"),
        (("serve", "frends", "--port", "0"), "did you mean friends?"),
    ],
)
def test_a_misspelled_word_is_told_with_the_one_that_is_meant(
    tmp_path: Path, typed: tuple[str, ...], meant: str
) -> None:
    JoinedSwarms(tmp_path).remember(FRIENDS)
    assert_clear(invoke(*typed, home=tmp_path), 2, meant)
