import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.errors import LocalError, ProtocolError, UsageError
from swarmnode.swarm.records.manifest import encode_manifest
from swarmnode.swarm.storage.swarmfile import load_swarm, new_swarm, save_swarm
from tests.swarm.records.test_manifest import make_manifest


@pytest.fixture
def swarm(tmp_path):
    return replace(
        new_swarm(encode_manifest(make_manifest())),
        bootstraps=("/ip4/127.0.0.1/tcp/4001/p2p/Qm1",),
        checkpoint=tmp_path / "checkpoint",
        bootstrap_key=b"private",
        bootstrap_listen=("/ip4/0.0.0.0/tcp/4001",),
    )


def test_file_round_trip_is_private(swarm, tmp_path):
    path = tmp_path / "test.swarm"
    save_swarm(swarm, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_swarm(path) == load_swarm(str(path)) == swarm
    assert [entry.name for entry in tmp_path.iterdir()] == ["test.swarm"]
    assert "private" not in repr(swarm)


def test_saving_again_replaces(swarm, tmp_path):
    path = tmp_path / "test.swarm"
    save_swarm(swarm, path)
    save_swarm(replace(swarm, bootstraps=()), path)
    assert load_swarm(path).bootstraps == ()


def test_invite_gives_the_same_swarm_without_secrets(swarm):
    invited = load_swarm(swarm.invite)
    assert (invited.id, invited.name, invited.bootstraps) == (swarm.id, swarm.name, swarm.bootstraps)
    assert invited.manifest is None and invited.bootstrap_key is None
    assert invited.with_manifest(swarm.manifest_bytes).manifest == swarm.manifest
    with pytest.raises(ProtocolError, match="not the swarm's id"):
        invited.with_manifest(encode_manifest(make_manifest(name="other")))


def test_an_invite_may_lie_in_a_file(swarm, tmp_path):
    path = tmp_path / "friends.invite"
    path.write_text(swarm.invite + "\n")
    assert load_swarm(path) == load_swarm(str(path)) == load_swarm(swarm.invite)
    path.write_text(swarm.invite[:-4])
    with pytest.raises(UsageError, match="invite"):
        load_swarm(path)


def test_unwritable_place_is_a_local_error(swarm, tmp_path):
    with pytest.raises(LocalError, match="cannot write"):
        save_swarm(swarm, tmp_path / "nowhere" / "test.swarm")


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"[]", b'{"name": 1}', b'{"swarmnode": 1, "manifest": "AAAA"}'])
def test_wrong_file(tmp_path, content):
    path = tmp_path / "x.swarm"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.swarm"):
        load_swarm(path)


def test_missing_file_folder_and_huge_file(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_swarm(tmp_path / "missing.swarm")
    with pytest.raises(UsageError, match=r"not a \.swarm file"):
        load_swarm(tmp_path)
    huge = tmp_path / "huge.swarm"
    with huge.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match=r"not a \.swarm file"):
        load_swarm(huge)


def test_newer_file(swarm, tmp_path):
    path = tmp_path / "x.swarm"
    save_swarm(swarm, path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "swarmnode": 2}))
    with pytest.raises(UsageError, match="upgrade"):
        load_swarm(path)


def test_damaged_invite_is_not_taken_for_a_file():
    with pytest.raises(UsageError, match="invite is damaged"):
        load_swarm("swarm1abcdefgh")
    with pytest.raises(UsageError, match="no such file"):
        load_swarm(str(Path("swarm.swarm")))
