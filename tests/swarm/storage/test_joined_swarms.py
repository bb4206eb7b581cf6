"""Swarms by name: an invite that was joined once, a .swarm file without its suffix, and the one that was used last."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.invite import Invite, encode_invite
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.swarmfile import (
    JoinedSwarms,
    load_all_named,
    load_swarm,
    names_a_swarm,
    new_swarm,
    save_swarm,
)
from tests.swarm.records.test_manifest import make_manifest

FRIENDS = encode_invite(Invite(bytes(32), "friends", ()))
OTHERS = encode_invite(Invite(bytes([1] * 32), "friends", ()))


def test_a_joined_swarm_is_known_by_its_name(tmp_path: Path) -> None:
    joined = JoinedSwarms(tmp_path)
    assert joined.names() == [] and joined.last is None and joined.invite_to("friends") is None
    assert joined.remember(FRIENDS) == "friends"
    assert load_swarm("friends", tmp_path).id == bytes(32)
    assert (tmp_path / "swarms" / "friends.invite").stat().st_mode & 0o777 == 0o600
    joined.used("friends")
    assert JoinedSwarms(tmp_path).last == "friends"


def test_a_name_is_one_swarms(tmp_path: Path) -> None:
    joined = JoinedSwarms(tmp_path)
    joined.remember(FRIENDS)
    joined.remember(encode_invite(Invite(bytes(32), "friends", ("/ip4/127.0.0.1/tcp/1",))))  # a newer one to the same
    with pytest.raises(UsageError, match="--as"):
        joined.remember(OTHERS)
    assert joined.remember(OTHERS, "club") == "club"
    assert joined.names() == ["club", "friends"]


@pytest.mark.parametrize("name", ["../friends", ".hidden", "a/b", "a\nb"])
def test_names_stay_in_their_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        JoinedSwarms(tmp_path).remember(FRIENDS, name)
    assert JoinedSwarms(tmp_path).invite_to(name) is None and not list(tmp_path.iterdir())


def test_the_suffix_of_a_file_may_be_left_away(tmp_path: Path) -> None:
    swarm = new_swarm(encode_manifest(make_manifest()))
    save_swarm(swarm, tmp_path / "club.swarm")
    loaded = load_swarm(str(tmp_path / "club"))
    assert loaded == swarm and loaded.file == tmp_path / "club.swarm"
    assert names_a_swarm(str(tmp_path / "club"), tmp_path / "home") and not names_a_swarm("Once upon a time", tmp_path)


def founders_file(folder: Path, name: str = "club") -> Path:
    folder.mkdir(exist_ok=True)
    save_swarm(new_swarm(encode_manifest(make_manifest(name=folder.name))), folder / f"{name}.swarm")
    return folder / f"{name}.swarm"


def test_a_founded_swarm_has_a_name_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, file = tmp_path / "home", founders_file(tmp_path / "one")
    joined = JoinedSwarms(home)
    assert joined.remember_file(file) == "club" == joined.last and joined.names() == ["club"]
    monkeypatch.chdir(tmp_path)
    assert load_swarm("club", home) == load_swarm(file) and load_swarm("club", home).file == file
    assert joined.file_of("club") == file and joined.file_of("other") is None
    joined.remember(load_swarm(file).invite, "club")  # as a friend who shares this home would
    assert load_swarm("club", home).file == file
    assert joined.remember_file(file) == "club"  # again, as when it is hosted again


def test_two_founded_swarms_of_one_name_are_told_apart(tmp_path: Path) -> None:
    home, one, other = tmp_path / "home", founders_file(tmp_path / "one"), founders_file(tmp_path / "other")
    joined = JoinedSwarms(home)
    assert joined.remember_file(one) == "club"
    longer = joined.remember_file(other)
    assert longer == f"club-{load_swarm(other).id.hex()[:8]}" and load_swarm(longer, home).file == other
    with pytest.raises(UsageError, match="--as"):
        joined.remember(FRIENDS, "club")
    one.unlink()
    assert set(load_all_named(home)) == {longer}
    with pytest.raises(UsageError, match=r"club is gone|, the file of club, is gone"):
        load_swarm("club", home)
    assert joined.remember_file(other) == "club"  # the name is free again


def test_a_forgotten_name_is_free_and_its_file_stays(tmp_path: Path) -> None:
    home, file = tmp_path / "home", founders_file(tmp_path / "one")
    joined = JoinedSwarms(home)
    joined.used(joined.remember(FRIENDS))
    joined.remember_file(file)
    joined.forget("club")
    assert joined.names() == ["friends"] and joined.last is None and file.exists()
    joined.forget("friends")
    joined.forget("../club")
    assert joined.names() == [] and load_all_named(home) == {}


NAMES = ("friends", "frisbee", "Club", "club-2", "smollm2-135m")


@pytest.mark.parametrize("name", NAMES)
def test_every_beginning_of_a_name_finds_it_or_is_refused_with_the_names_it_may_mean(tmp_path: Path, name: str) -> None:
    joined = JoinedSwarms(tmp_path)
    ids = {each: bytes([n] * 32) for n, each in enumerate(NAMES)}
    for each, swarm in ids.items():
        joined.remember(encode_invite(Invite(swarm, each, ())))
    for end in range(1, len(name) + 1):
        typed = name[:end]
        meant = [each for each in NAMES if each.startswith(typed)] or [
            each for each in NAMES if each.lower().startswith(typed)
        ]
        if typed in NAMES or len(meant) == 1:
            assert load_swarm(typed, tmp_path).id == ids[typed if typed in NAMES else meant[0]]
            continue
        with pytest.raises(UsageError) as refused:
            load_swarm(typed, tmp_path)
        assert all(each in str(refused.value) for each in meant)


def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="an invite"):
        load_swarm("zzz", tmp_path)
    JoinedSwarms(tmp_path).remember(FRIENDS)
    with pytest.raises(UsageError, match="known here: friends"):
        load_swarm("zzz", tmp_path)
    with pytest.raises(UsageError):
        load_swarm("", tmp_path)
