"""A private swarm of real processes, with the owner's commands. Who is admitted to what: tests/node/test_membership.py."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, LocalError, PeerError
from swarmnode.localswarm import START_TIMEOUT_S, NodeProcess
from swarmnode.net.identity import Identity
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.links.link_config import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
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
        volunteers = self.invite()
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
    picture = json.loads(club.local.command("members", str(club.local.file), "--json"))
    roles = {member["name"]: member["role"] for member in picture["members"]}
    assert roles == {"a": "volunteer", "b": "volunteer", "bootstrap": "trainer"}
    assert [invite["role"] for invite in picture["invites"]] == ["trainer", "volunteer", "client"]


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
