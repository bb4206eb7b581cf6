"""Swarms by name: an invite that was joined once, a .swarm file without its suffix, and the one that was used last."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.invite import Invite, encode_invite
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.named_swarms import JoinedSwarms
from swarmnode.swarm.storage.swarmfile import load_swarm, names_a_swarm, new_swarm, save_swarm
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
    with pytest.raises(UsageError, match="--name"):
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
    assert names_a_swarm(str(tmp_path / "club"), None) and not names_a_swarm("Once upon a time", tmp_path)
