"""A private swarm of real processes: invites, refusals, the table, revocation with the owner offline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from swarmnode.codec.messages import VERSION, GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, LocalError, NotAdmitted, PeerError
from swarmnode.localswarm import LocalSwarm, NodeProcess
from swarmnode.net.identity import Identity
from swarmnode.net.libp2p.engine import Engine, EngineConfig
from swarmnode.net.links.link import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.roles.fetching.sources import ask
from swarmnode.roles.host import Host, HostConfig
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm
from tests.real.conftest import PROMPT, TinyModel

PASSWORD = "correct horse"
MINUTE_S = 60.0


class Club:
    """A private swarm with its door and two nodes that came by invites; the owner's key is on nobody's machine but the host's."""

    def __init__(self, local: LocalSwarm, model: TinyModel) -> None:
        self.local = local
        local.environment["SWARMNODE_OWNER_PASSWORD"] = PASSWORD
        assert local.create(model.folder, "--private") == ""
        self.door = local.bootstrap()
        volunteers = self.invite()
        self.nodes = [self.node(name, span, volunteers) for name, span in (("a", "0:3"), ("b", "3:6"))]
        self.client_invite = self.invite("--role", "client")

    def invite(self, *options: str) -> str:
        return self.local.command("invite", str(self.local.file), *options).strip()

    def node(self, name: str, span: str, invite: str) -> NodeProcess:
        return self.local.node(name, "--span", span, swarm=invite)

    def generate(self, invite: str, *options: str, patience_s: float = 60) -> list[int]:
        prompt = ",".join(map(str, PROMPT))
        options = ("--ids", prompt, "-n", "8", "--json", "--patience", str(patience_s), *options)
        return json.loads(self.local.command("generate", invite, *options))["ids"]

    @property
    def swarm(self) -> Swarm:
        return load_swarm(self.local.file)


@pytest.fixture(scope="module")
def club(tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Club]:
    with LocalSwarm(tmp_path_factory.mktemp("club")) as local:
        yield Club(local, tiny)


def test_invited_nodes_serve_an_invited_client(club: Club, tiny: TinyModel) -> None:
    for node in club.nodes:
        node.wait_for("ready")
    assert club.generate(club.client_invite) == tiny.alone(PROMPT, 8)
    picture = json.loads(club.local.command("members", str(club.local.file), "--json"))
    roles = {member["name"]: member["role"] for member in picture["members"]}
    assert roles == {"a": "volunteer", "b": "volunteer", "bootstrap": "trainer"}
    assert [invite["role"] for invite in picture["invites"]] == ["trainer", "volunteer", "client"]


def test_a_client_goes_through_those_it_trusts_alone(club: Club, tiny: TinyModel) -> None:
    both = [option for node in club.nodes for option in ("--trust", node.peer[-12:])]
    assert club.generate(club.client_invite, *both) == tiny.alone(PROMPT, 8)
    with pytest.raises(LocalError, match="among those you trust, no live peer holds units 3-5"):
        club.generate(club.client_invite, *both[:2], patience_s=2)


def test_the_bare_address_admits_nobody(club: Club) -> None:
    with pytest.raises(LocalError, match="is private: ask its owner"):
        club.generate(club.swarm.invite, patience_s=5)


def test_a_clients_invite_is_not_a_volunteers(club: Club) -> None:
    node = club.node("eager", "0:3", club.client_invite)
    assert node.finish(60) == 1
    assert "is for a client" in node.tail()


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


def test_an_invite_for_one_peer_and_one_with_one_use(club: Club, tiny: TinyModel) -> None:
    for options in (("--peer", Identity.generate().peer_id), ("--expires", "1s")):
        invite = club.invite("--role", "client", *options)
        time.sleep(1.1)  # what expires after a second has
        with pytest.raises(LocalError, match=r"another peer|expired"):
            club.generate(invite, patience_s=5)
    once = club.invite("--role", "client", "--uses", "1")
    assert club.generate(once) == tiny.alone(PROMPT, 8) == club.generate(once), "the same peer may come again"


async def test_a_revoked_peer_is_out_within_a_minute_with_the_owner_offline(club: Club, tiny: TinyModel) -> None:
    """The owner tells whoever is there and goes; a node that was not, and the revoked one itself, hear of it from peers."""
    leaving = club.node("c", "0:3", club.invite())
    leaving.wait_for("ready")
    started_s = time.monotonic()
    club.local.command("revoke", str(club.local.file), leaving.peer[-10:])
    code = await asyncio.to_thread(leaving.finish, MINUTE_S)
    assert code == 1 and "revoked" in leaving.tail()
    assert time.monotonic() - started_s < MINUTE_S
    again = club.node("c", "0:3", club.invite())  # another invite, the same peer
    assert await asyncio.to_thread(again.finish, MINUTE_S) == 1 and "not admit" in again.tail()
    newcomer = await Host.join(
        load_swarm(club.client_invite), HostConfig(club.local.folder / "n", looks_on=True), role="client"
    )
    try:
        assert newcomer.access_control is not None
        await newcomer.wait_joined(20)
        await newcomer.access_control.exchange()
        assert newcomer.access_control.membership.revocations.covers(leaving.peer)
        assert leaving.peer not in newcomer.directory.peers()
        assert {node.peer for node in club.nodes} <= newcomer.directory.peers().keys(), "the others are there"
    finally:
        await newcomer.close()
    assert club.generate(club.client_invite) == tiny.alone(PROMPT, 8), "the others go on"


def test_a_revoked_invite_admits_nobody_any_more(club: Club) -> None:
    guest = club.invite("--role", "client")
    club.generate(guest)
    club.local.command("revoke", str(club.local.file), guest)
    with pytest.raises(LocalError, match="does not admit"):
        club.generate(guest, patience_s=5)


async def test_the_password_and_the_key_are_needed(club: Club, tmp_path: Path) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("guess\n")
    with pytest.raises(LocalError, match="password is wrong"):
        club.local.command("invite", str(club.local.file), "--password-file", str(wrong))
    with pytest.raises(NotAdmitted, match="ask its owner"):
        await Host.join(replace(club.swarm, grant=b""), HostConfig(tmp_path), role="client")
