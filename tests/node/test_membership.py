"""A private swarm of whole nodes: invites, refusals, trust, and revocation with the owner offline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from swarmnode.client.owner_client import OwnerClient, OwnersView, end_membership
from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, ManifestReply
from swarmnode.errors import ErrorCode, LocalError, NoRoute, NotAdmitted, PeerError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.membership.access_control import is_first_use, load_home_key
from swarmnode.membership.owner import InviteTerms, find_invite, make_invite, newest_list, revoke, with_host_grant
from swarmnode.net.identity import Identity, SigningKey
from swarmnode.node.bootstrap import Bootstrap
from swarmnode.peer.host import Host
from swarmnode.peer.host_config import HostConfig
from swarmnode.peer.questions import ask
from swarmnode.swarm.records.announcement import parse_trust
from swarmnode.swarm.records.invite import Role, open_grant
from swarmnode.swarm.records.manifest import PRIVATE
from swarmnode.swarm.storage.owner_files import IssuedInvites, issued_invites_path, open_admitted_peers, record_members
from swarmnode.swarm.storage.swarmfile import Swarm, load_swarm, save_swarm
from tests.adapters import merged_checkpoint, save_llama_adapter
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

    async def used(self, invite: Swarm) -> int:
        """How many uses of an invite the swarm has counted."""
        client = await self.owners_client()
        uses = client.uses()
        await client.close()
        return uses.get(open_grant(invite.grant, invite.id, invite.owner).invite_id.hex(), 0)

    async def generate(
        self, invite: str, home: str = "guest", *, trust: list[str] | None = None, adapter: str = ""
    ) -> list[int]:
        """As a client with a home, which is where it keeps who it is."""
        options: dict[str, Any] = {
            "home": self.virtual.folder / home,
            "patience_s": 5.0,
            "trust": parse_trust(trust or []),
        }
        async with self.virtual.client(invite, **options) as client:
            return (await client.generate(PROMPT, max_new_tokens=NEW, adapter=adapter)).ids

    async def revoke(self, **whom: Any) -> None:
        """As `swarmnode revoke` does."""
        client = await self.owners_client()
        current = newest_list(self.swarm, [self.book.revocations, client.revocations])
        self.book.revocations = revoke(self.swarm, self.owner, current, **whom)
        assert await client.publish(self.book.revocations)
        await client.close()

    async def members(self) -> list[dict[str, Any]]:
        """As `swarmnode members` shows them."""
        client = await self.owners_client()
        view = await OwnersView.read(load_swarm(self.virtual.file), self.book, client)
        await client.close()
        picture: list[dict[str, Any]] = view.to_json()["members"]
        return picture

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
async def test_invited_nodes_serve_an_invited_client_also_with_an_adapter_of_its_own(
    tiny: TinyModel, tmp_path: Path
) -> None:
    adapter = save_llama_adapter(tmp_path / "verse", tiny.folder)
    merged = TinyModel(merged_checkpoint(tmp_path / "merged", tiny.folder, adapter), tiny.units)
    async with club_of(tiny, tmp_path) as club:
        invite = club.invite(Role.CLIENT)
        assert await club.generate(invite) == tiny.alone(PROMPT, NEW)
        assert await club.generate(invite, adapter=str(adapter)) == merged.alone(PROMPT, NEW)
        members = await club.members()
        assert {member["name"]: member["role"] for member in members} == dict.fromkeys(("a", "b", ""), "volunteer")
        assert [guest.role for guest in club.book.guests] == ["volunteer", "volunteer", "client"]


@in_virtual_time
async def test_a_client_goes_through_those_it_trusts_alone(tiny: TinyModel, tmp_path: Path) -> None:
    async with club_of(tiny, tmp_path) as club:
        invite, both = club.invite(Role.CLIENT), [node.peer[-12:] for node in club.nodes]
        assert await club.generate(invite, trust=both) == tiny.alone(PROMPT, NEW)
        with pytest.raises(NoRoute, match="among those you trust, no machine has layers 3-5"):
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
        await asyncio.sleep(1.0)  # of two in the same second, the digest of the id decides
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(once, "another")


@in_virtual_time
async def test_a_node_and_programs_of_one_home_are_one_use_and_failed_starts_are_none(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with club_of(tiny, tmp_path) as club:
        line = club.invite(uses=1)
        friends = load_swarm(line)
        home = club.virtual.folder / "homes" / "friend"
        assert is_first_use(friends, home)
        with pytest.raises(LocalError, match="cuda"):  # found before it joins
            await club.virtual.node("friend", swarm=line, device="cuda:7").task
        assert is_first_use(friends, home) and await club.used(friends) == 0
        with pytest.raises(LocalError):  # found when the model is known
            await club.virtual.node("friend", swarm=line, memory_bytes=1000).task
        await club.virtual.node("friend", "0:3", swarm=line).wait_for("ready")
        assert not is_first_use(friends, home)
        async with club.virtual.client(line, home=home) as chat, club.virtual.client(line, home=home):
            assert (await chat.generate(PROMPT, max_new_tokens=NEW)).ids == tiny.alone(PROMPT, NEW)
        assert await club.used(friends) == 1
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(line, "another")


@in_virtual_time
async def test_the_owners_node_notes_members_that_the_owner_then_revokes_while_they_are_away(
    tiny: TinyModel, tmp_path: Path
) -> None:
    """The bootstrap peer runs with the owner's file; the member leaves before the owner looks."""
    async with club_of(tiny, tmp_path) as club:
        club.book.save()
        invite = club.invite(Role.CLIENT, uses=1, note="Carol")
        club.book.save()
        assert await club.generate(invite) == tiny.alone(PROMPT, NEW)
        await asyncio.sleep(MINUTE_S)
        noted = {peer.invite: peer for peer in open_admitted_peers(club.virtual.file)}
        assert noted[club.book.guests[-1].invite].role == "client"
        (carol,) = [member for member in await club.members() if member["note"] == "Carol"]
        assert carol["state"] == "offline" and not carol["revoked"]
        view = await OwnersView.read(load_swarm(club.virtual.file), club.book, None)
        ended = view.find(carol["peers"][0]["peer"][-8:])
        assert ended == view.find("Carol") or ended.invites == view.find("Carol").invites
        client = await club.owners_client()
        assert await end_membership(club.swarm, club.owner, club.book, client, ended)
        await client.close()
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(invite)
        (carol,) = [member for member in await club.members() if member["note"] == "Carol"]
        assert carol["revoked"]


@in_virtual_time
async def test_a_revoked_home_cannot_come_back_as_another_program(tiny: TinyModel, tmp_path: Path) -> None:
    """By an invite of several, of which the others go on."""
    async with club_of(tiny, tmp_path) as club:
        shared = club.invite(Role.CLIENT)
        assert await club.generate(shared, "one") == await club.generate(shared, "other") == tiny.alone(PROMPT, NEW)
        home = load_home_key(club.virtual.folder / "one")
        await club.revoke(homes=[home.public])
        (club.virtual.folder / "one" / "client.key").unlink()
        with pytest.raises(NotAdmitted, match="does not admit"):
            await club.generate(shared, "one")
        assert await club.generate(shared, "other") == tiny.alone(PROMPT, NEW)


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


HOUR_S, DAY_S = 3_600.0, 86_400.0


class WrongClock:
    """How far a machine's clock is ahead."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return self.ahead_s


@pytest.mark.parametrize("jump_s", [-10 * 365 * DAY_S, -40.0, 30 * DAY_S])
@in_virtual_time
async def test_a_clock_that_jumps_ends_no_membership_and_changes_no_text(
    tiny: TinyModel, tmp_path: Path, jump_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    """A node serves on while its clock is wrong, by the time that the others share, and after the clock is right again."""
    clock = WrongClock()
    async with club_of(tiny, tmp_path) as club:
        await club.nodes[1].stop()
        node = club.virtual.node("c", SPANS["b"], swarm=club.invite(life_s=7 * DAY_S), ahead_s=clock)
        await node.wait_for("ready")
        invite = club.invite(Role.CLIENT)
        for clock.ahead_s in (jump_s, 0.0):
            for _ in range(2):
                await asyncio.sleep(MINUTE_S)
                assert await club.generate(invite) == tiny.alone(PROMPT, NEW)
        assert not node.task.done() and "clock was set" in caplog.text


@pytest.mark.parametrize("jump_s", [-2 * HOUR_S, 30 * DAY_S])
@in_virtual_time
async def test_a_node_whose_clock_jumps_while_it_is_alone_waits_until_the_clock_is_right(
    tiny: TinyModel, tmp_path: Path, jump_s: float
) -> None:
    """It follows its clock, since no machine says otherwise, and waits: what it holds of a membership is out of its time."""
    clock = WrongClock()
    async with club_of(tiny, tmp_path) as club:
        await club.nodes[1].stop()
        node = club.virtual.node("c", SPANS["b"], swarm=club.invite(life_s=7 * DAY_S), ahead_s=clock)
        await node.wait_for("ready")
        await club.nodes[0].stop()
        await club.door.close()
        clock.ahead_s = jump_s
        await asyncio.sleep(3 * MINUTE_S)
        assert not node.task.done(), "a wrong clock is no end of a membership"
        clock.ahead_s = 0.0
        await club.virtual.bootstrap()
        club.virtual.node("a", SPANS["a"], swarm=club.invite())
        await asyncio.sleep(3 * MINUTE_S)
        assert await club.generate(club.invite(Role.CLIENT)) == tiny.alone(PROMPT, NEW)


@pytest.mark.parametrize("ahead_s", [-2 * DAY_S, 30 * DAY_S])
@in_virtual_time
async def test_a_node_that_starts_with_a_wrong_clock_serves_once_it_is_set(
    tiny: TinyModel, tmp_path: Path, ahead_s: float
) -> None:
    clock = WrongClock()
    async with club_of(tiny, tmp_path) as club:
        await club.nodes[1].stop()
        invite = club.invite(life_s=7 * DAY_S)
        first = club.virtual.node("c", SPANS["b"], swarm=invite, ahead_s=clock)
        await first.wait_for("ready")
        await first.stop()
        clock.ahead_s = ahead_s
        node = club.virtual.node("c", SPANS["b"], swarm=invite, ahead_s=clock)
        await asyncio.sleep(2 * MINUTE_S)
        assert not node.task.done()
        clock.ahead_s = 0.0
        await asyncio.sleep(2 * MINUTE_S)
        assert await club.generate(club.invite(Role.CLIENT)) == tiny.alone(PROMPT, NEW)


@in_virtual_time
async def test_the_owners_book_goes_on_after_a_full_disk(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = True

    def note(file: Path, peers: Any) -> None:
        if full:
            raise LocalError(f"cannot write {file}: no space left on device")
        record_members(file, peers)

    monkeypatch.setattr("swarmnode.peer.host.record_members", note)
    async with club_of(tiny, tmp_path) as club:
        club.book.save()
        await asyncio.sleep(MINUTE_S)
        full = False
        await asyncio.sleep(MINUTE_S)
        assert {peer.name for peer in open_admitted_peers(club.virtual.file)} >= {"a", "b"}


@in_virtual_time
async def test_a_membership_that_is_over_ends_the_node(tiny: TinyModel, tmp_path: Path) -> None:
    """By its own clock and that of the others: also where it starts again."""
    async with club_of(tiny, tmp_path) as club:
        await club.nodes[1].stop()
        invite = club.invite(life_s=2 * MINUTE_S)
        node = club.virtual.node("c", SPANS["b"], swarm=invite)
        await node.wait_for("ready")
        await asyncio.sleep(3 * MINUTE_S)
        for ended in (node, club.virtual.node("c", SPANS["b"], swarm=invite)):
            with pytest.raises(NotAdmitted, match="expired"):
                await asyncio.wait_for(ended.task, MINUTE_S)
