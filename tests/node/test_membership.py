"""A private swarm of whole nodes: invites, refusals, trust, and revocation with the owner offline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.owner_client import OwnerClient
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, NoRoute, NotAdmitted, PeerError
from swarmnode.membership.owner import InviteTerms, find_invite, make_invite, newest_list, revoke, with_host_grant
from swarmnode.net.identity import Identity, SigningKey
from swarmnode.net.links.link_config import LinkConfig
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.peer.questions import ask
from swarmnode.swarm.peers.standing import parse_trust
from swarmnode.swarm.records.certificate import Role
from swarmnode.swarm.records.manifest import PRIVATE
from swarmnode.swarm.storage.issued_invites import IssuedInvites, issued_invites_path
from swarmnode.swarm.storage.swarmfile import Swarm, save_swarm
from tests.net.virtual import in_virtual_time
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

NEW = 8
MINUTE_S = 60.0
SPANS = {"a": "0:3", "b": "3:6"}


@dataclass
class Club:
    """A private swarm with its door and two nodes that came by invites; the owner is online for as long as a command takes."""

    virtual: VirtualSwarm
    swarm: Swarm
    owner: SigningKey
    book: IssuedInvites
    door: Bootstrap
    nodes: list[VirtualMember] = field(default_factory=list)

    def invite(self, role: Role = Role.VOLUNTEER, **terms: Any) -> str:
        return make_invite(self.swarm, self.owner, InviteTerms(role, **terms), self.book)

    async def generate(self, invite: str, home: str = "guest", *, trust: list[str] | None = None) -> list[int]:
        """As a client with a home, which is where it keeps who it is."""
        options: dict[str, Any] = {
            "home": self.virtual.folder / home,
            "patience_s": 5.0,
            "trust": parse_trust(trust or []),
        }
        async with self.virtual.client(invite, **options) as client:
            return (await client.generate(PROMPT, max_new_tokens=NEW)).ids

    async def revoke(self, **whom: Any) -> None:
        """As `swarmnode revoke` does."""
        client = await self.owners_client()
        current = newest_list(self.swarm, [self.book.revocations, client.revocations])
        self.book.revocations = revoke(self.swarm, self.owner, current, **whom)
        assert await client.publish(self.book.revocations)
        await client.close()

    async def owners_client(self) -> OwnerClient:
        return await OwnerClient.join(self.swarm, self.virtual.folder / "owner", platform=self.virtual.platform())


@contextlib.asynccontextmanager
async def club_of(tiny: TinyModel, folder: Path) -> AsyncIterator[Club]:
    async with VirtualSwarm(folder) as virtual:
        owner, book = SigningKey.generate(), IssuedInvites(issued_invites_path(virtual.file))
        swarm = with_host_grant(virtual.create(tiny.folder, membership=PRIVATE, owner=owner), owner, book)
        save_swarm(swarm, virtual.file)
        club = Club(virtual, swarm, owner, book, await virtual.bootstrap())
        volunteers = club.invite()
        club.nodes = [virtual.node(name, span, swarm=volunteers) for name, span in SPANS.items()]
        for node in club.nodes:
            await node.wait_for("ready")
        yield club


@in_virtual_time
async def test_invited_nodes_serve_an_invited_client(tiny: TinyModel, tmp_path: Path) -> None:
    async with club_of(tiny, tmp_path) as club:
        assert await club.generate(club.invite(Role.CLIENT)) == tiny.alone(PROMPT, NEW)
        client = await club.owners_client()
        roles = {member["name"]: member["role"] for member in client.picture()["members"]}
        await client.close()
        assert roles == {"a": "volunteer", "b": "volunteer", "": "trainer"}
        assert [guest.role for guest in club.book.guests] == ["trainer", "volunteer", "client"]


@in_virtual_time
async def test_a_client_goes_through_those_it_trusts_alone(tiny: TinyModel, tmp_path: Path) -> None:
    async with club_of(tiny, tmp_path) as club:
        invite, both = club.invite(Role.CLIENT), [node.peer[-12:] for node in club.nodes]
        assert await club.generate(invite, trust=both) == tiny.alone(PROMPT, NEW)
        with pytest.raises(NoRoute, match="among those you trust, no live peer holds layers 3-5"):
            await club.generate(invite, trust=both[:1])


@in_virtual_time
async def test_who_has_no_invite_for_it_is_not_admitted(tiny: TinyModel, tmp_path: Path) -> None:
    """With the bare address; with an invite for somebody else, or one that has expired; to lend, with a client's invite."""
    async with club_of(tiny, tmp_path) as club:
        with pytest.raises(NotAdmitted, match="is private: ask its owner"):
            await club.generate(club.swarm.invite)
        with pytest.raises(NotAdmitted, match="ask its owner"):
            await Host.join(
                replace(club.swarm, grant=b""),
                HostConfig(tmp_path / "x"),
                role="client",
                platform=club.virtual.platform(),
            )
        with pytest.raises(NotAdmitted, match="another peer"):
            await club.generate(club.invite(Role.CLIENT, peer=Identity.generate().peer_id))
        short = club.invite(Role.CLIENT, life_s=1.0)
        await asyncio.sleep(MINUTE_S)
        with pytest.raises(NotAdmitted, match="expired"):
            await club.generate(short)
        with pytest.raises(NotAdmitted, match="is for a client"):
            await club.virtual.node("eager", "0:3", swarm=club.invite(Role.CLIENT)).task


@in_virtual_time
async def test_a_stranger_who_knows_everything_but_has_no_invite_gets_nothing(tiny: TinyModel, tmp_path: Path) -> None:
    """Swarm id, addresses, protocols: neither the table nor the manifest is answered."""
    async with club_of(tiny, tmp_path) as club:
        stranger = club.virtual.world.join()
        board = Switchboard(stranger, "/swarmnode/manifest/1", Hello(VERSION, club.swarm.id), LinkConfig())
        assert not await stranger.connect(club.swarm.bootstraps, timeout_s=5), "the table let a stranger in"
        with pytest.raises(PeerError) as caught:
            async for _frame, body in ask(board, club.door.host.peer_id, GetManifest()):
                assert not isinstance(body, ManifestReply)
        assert caught.value.code is ErrorCode.REFUSED
        await board.close()


@in_virtual_time
async def test_an_invite_with_one_use(tiny: TinyModel, tmp_path: Path) -> None:
    async with club_of(tiny, tmp_path) as club:
        once = club.invite(Role.CLIENT, uses=1)
        assert await club.generate(once) == tiny.alone(PROMPT, NEW) == await club.generate(once), (
            "the same may come again"
        )
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(once, "another")


@in_virtual_time
async def test_a_revoked_peer_is_out_within_a_minute_with_the_owner_offline(tiny: TinyModel, tmp_path: Path) -> None:
    """The owner tells whoever is there and goes; a node that was not, and the revoked one itself, hear of it from peers."""
    async with club_of(tiny, tmp_path) as club:
        virtual, invite = club.virtual, club.invite(Role.CLIENT)
        leaving = virtual.node("c", "0:3", swarm=club.invite())
        await leaving.wait_for("ready")
        await club.revoke(peers=[leaving.peer])
        with pytest.raises(NotAdmitted, match="revoked"):
            await asyncio.wait_for(leaving.task, MINUTE_S)
        again = virtual.node("c", "0:3", swarm=club.invite())  # another invite, the same peer
        with pytest.raises(NotAdmitted, match="not admit"):
            await asyncio.wait_for(again.task, MINUTE_S)
        async with virtual.client(invite) as newcomer:
            access_control = newcomer._host.access_control
            assert access_control is not None
            await access_control.exchange()
            assert access_control.membership.revocations.covers(leaving.peer)
            known = {peer["peer"] for peer in newcomer.status()["peers"]}
            assert leaving.peer not in known
            assert {node.peer for node in club.nodes} <= known, "the others are there"
        assert await club.generate(invite) == tiny.alone(PROMPT, NEW), "the others go on"


@in_virtual_time
async def test_a_revoked_invite_admits_nobody_any_more(tiny: TinyModel, tmp_path: Path) -> None:
    async with club_of(tiny, tmp_path) as club:
        guest = club.invite(Role.CLIENT)
        await club.generate(guest)
        named = find_invite(guest, club.swarm, club.book)
        await club.revoke(invites=[named])
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(guest)
