from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

from swarmnode.errors import UsageError
from swarmnode.swarm.records.invite import OwnedInvite, encode_invite, sign_swarm
from swarmnode.swarm.storage.swarmfile import FILE, USER_FILE, load_swarm, public_swarms
from tests.swarm.society import OWNER, SWARM

DOORS = ("/ip4/203.0.113.7/tcp/4001/p2p/12D3KooWxyz",)
INVITE = encode_invite(OwnedInvite(SWARM, "tiny", DOORS, OWNER.public, sign_swarm(SWARM, OWNER)))


def write(home: Path, *swarms: dict[str, str], version: int = 1) -> None:
    (home / USER_FILE).write_text(json.dumps({"swarmnode": version, "swarms": swarms}))


def test_the_shipped_list_is_part_of_the_package_and_valid(tmp_path: Path):
    assert resources.files("swarmnode.swarm.storage").joinpath(FILE).is_file()
    assert all(name == swarm.name for name, swarm in public_swarms(tmp_path).items())


def test_a_name_leads_to_the_swarm_with_its_owner(tmp_path: Path):
    write(tmp_path, {"name": "tiny", "invite": INVITE, "about": "a test"})
    assert public_swarms(tmp_path)["tiny"].invite == INVITE
    swarm = load_swarm("tiny", tmp_path)
    assert (swarm.id, swarm.bootstraps, swarm.owner, swarm.private) == (SWARM, DOORS, OWNER.public, False)
    assert "other" not in public_swarms(tmp_path)
    with pytest.raises(UsageError, match="known here: tiny"):
        load_swarm("other", tmp_path)


def test_the_users_own_entry_counts_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shipped = [{"name": "tiny", "invite": INVITE, "about": "shipped"}]
    monkeypatch.setattr(
        "swarmnode.swarm.storage.swarmfile.resources.files",
        lambda _package: _Folder({"swarmnode": 1, "swarms": shipped}),
    )
    assert public_swarms(tmp_path)["tiny"].about == "shipped"
    write(tmp_path, {"name": "tiny", "invite": INVITE, "about": "mine"})
    assert public_swarms(tmp_path)["tiny"].about == "mine"


class _Folder:
    def __init__(self, content: object) -> None:
        self._content = content

    def joinpath(self, _name: str) -> _Folder:
        return self

    def read_bytes(self) -> bytes:
        return json.dumps(self._content).encode()


def test_what_is_no_list_is_said_to_be_none(tmp_path: Path):
    for text, words in (("hello", "not a list"), ('{"swarmnode": 2}', "upgrade"), ("[]", "not a list")):
        (tmp_path / USER_FILE).write_text(text)
        with pytest.raises(UsageError, match=words):
            public_swarms(tmp_path)
    write(tmp_path, {"name": "tiny", "invite": INVITE[:-3] + "aaa"})
    with pytest.raises(UsageError, match="damaged"):
        public_swarms(tmp_path)
