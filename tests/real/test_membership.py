"""A private swarm of real processes, with the owner's commands. Who is admitted to what: tests/node/test_membership.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, LocalError, PeerError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.localswarm import START_TIMEOUT_S, NodeProcess
from swarmnode.net.identity import Identity
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.peer.questions import ask
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from tests.real.forked import ForkedSwarm
from tests.tiny import PROMPT, TinyModel

PASSWORD = "correct horse"
NEW = 8


class Club:
    """A private swarm with its door and two nodes that came by invites; the owner's key is on nobody's machine but the host's."""

    def __init__(self, local: ForkedSwarm, model: TinyModel) -> None:
        self.local = local
        local.environment["SWARMNODE_OWNER_PASSWORD"] = PASSWORD
        assert local.create(model.folder, membership="private") == ""
        self.door = local.bootstrap()
        volunteers = self.invite("--uses", "2")
        self.nodes = [self.node(name, span, volunteers) for name, span in (("a", "0:3"), ("b", "3:6"))]
        self.client_invite = self.invite("--role", "client")

    def invite(self, *options: str) -> str:
        return self.local.command("invite", str(self.local.file), *options).strip()

    def node(self, name: str, span: str, invite: str) -> NodeProcess:
        return self.local.node(name, "--span", span, swarm=invite)

    def generate(self, invite: str, *options: str) -> list[int]:
        prompt = ",".join(map(str, PROMPT))
        arguments = (invite, "--ids", prompt, "-n", str(NEW), "--json", *options)
        return json.loads(self.local.command("generate", *arguments))["ids"]

    def members(self) -> dict[str, Any]:
        picture: dict[str, Any] = json.loads(self.local.command("members", str(self.local.file), "--json"))
        return picture

    def uses(self, note: str) -> int:
        return next(invite["used"] for invite in self.members()["invites"] if invite["note"] == note)

    @property
    def swarm(self) -> Swarm:
        return load_swarm(self.local.file)


@pytest.fixture(scope="module")
def club(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Club]:
    with ForkedSwarm(tmp_path_factory.mktemp("club")) as local:
        yield Club(local, tiny)


def test_invited_nodes_serve_an_invited_client(club: Club, tiny: TinyModel) -> None:
    for node in club.nodes:
        node.wait_for("ready")
    trusted = [option for node in club.nodes for option in ("--trust", node.peer[-12:])]
    assert club.generate(club.client_invite, *trusted) == tiny.alone(PROMPT, NEW)
    picture = club.members()
    roles = {member["name"]: member["role"] for member in picture["members"]}
    assert {name: roles[name] for name in ("a", "b", "bootstrap")} == dict.fromkeys(
        ("a", "b", "bootstrap"), "volunteer"
    )
    assert [invite["role"] for invite in picture["invites"]] == ["volunteer", "volunteer", "client"]


def test_a_friend_looks_fails_lends_and_asks_by_one_use(club: Club, tiny: TinyModel, tmp_path: Path) -> None:
    """With one home; then a second one comes with the same invite, and the owner revokes the friend, who is away by then."""
    invite, home = club.invite("--note", "Carol"), club.local.folder / "homes" / "carol"
    used = {"home": str(home), "node": ["run", invite, "--span", "0:3", "--json"]}
    said = club.local.command("doctor", invite, "--home", used["home"])
    assert "ok   invite: for a volunteer, until" in said and "this test used none of its uses" in said
    with pytest.raises(LocalError, match="cuda"):
        club.local.command(*used["node"], "--device", "cuda:7", "--home", used["home"])
    assert club.uses("Carol") == 0
    node = club.local.start("carol", used["node"])
    node.wait_for("ready")
    ask = ("generate", invite, "--ids", ",".join(map(str, PROMPT)), "-n", str(NEW), "--json")
    assert json.loads(club.local.command(*ask, "--home", used["home"]))["ids"] == tiny.alone(PROMPT, NEW)
    assert club.uses("Carol") == 1
    with pytest.raises(LocalError, match="does not admit"):
        club.local.command(*ask, "--home", str(tmp_path / "another"))
    node.kill(signal.SIGINT)
    assert node.finish(START_TIMEOUT_S) == 0
    told = json.loads(club.local.command("revoke", str(club.local.file), "Carol", "--json"))
    assert len(told["invites"]) == 1 and told["told"] >= 1
    with pytest.raises(LocalError, match=r"revoked|does not admit"):
        club.local.command(*ask, "--home", used["home"])
    (carol,) = [member for member in club.members()["members"] if member["note"] == "Carol"]
    assert carol["revoked"] and carol["state"] == "offline" and len(carol["peers"]) == 2


async def test_a_stranger_who_knows_everything_but_has_no_invite_gets_nothing(club: Club, tmp_path: Path) -> None:
    """Swarm id, addresses, protocols: neither the table nor the manifest is answered."""
    identity = Identity.generate()
    identity.save(tmp_path / "key")
    stranger = await Engine.start(EngineConfig(tmp_path / "key"))
    board = Switchboard(stranger, "/swarmnode/manifest/1", Hello(VERSION, club.swarm.id), LinkConfig())
    try:
        assert not await stranger.connect(club.swarm.bootstraps, timeout_s=5), "the table let a stranger in"
        with pytest.raises(PeerError) as caught:
            async for _frame, body in ask(board, club.door.peer, GetManifest()):
                assert not isinstance(body, ManifestReply)
        assert caught.value.code is ErrorCode.REFUSED
    finally:
        await board.close()
        await stranger.close()


def test_the_bare_address_admits_nobody(club: Club) -> None:
    with pytest.raises(LocalError, match="is private: ask its owner"):
        club.generate(club.swarm.invite)


def test_a_revoked_peer_leaves_with_the_owner_offline(club: Club, tiny: TinyModel) -> None:
    leaving = club.node("c", "0:3", club.invite())
    leaving.wait_for("ready")
    club.local.command("revoke", str(club.local.file), leaving.peer[-10:])
    assert leaving.finish(START_TIMEOUT_S) == 2 and "revoked" in leaving.tail()  # 2: no use in starting it again
    assert club.generate(club.client_invite) == tiny.alone(PROMPT, NEW), "the others go on"


def test_the_password_is_needed(club: Club, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("guess\n")
    with pytest.raises(LocalError, match="password is wrong"):
        club.local.command("invite", str(club.local.file), "--password-file", str(wrong))
