"""Membership on links: both sides, every protocol, and its end while links are open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from swarmnode.codec.body import VERSION
from swarmnode.codec.messages import GetManifest, Hello, Revocations
from swarmnode.errors import ErrorCode, PeerError, PeerRefused, ProtocolError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Channel, Switchboard
from swarmnode.membership.access_control import MEMBERSHIP_PROTOCOL, AccessControl
from swarmnode.net.identity import Identity
from swarmnode.net.memory.network import FakeNetwork, FakeWorld
from swarmnode.swarm.peers.record_validation import by_subkey, notice_rules
from swarmnode.swarm.records.invite import Role, admit_peer
from swarmnode.swarm.records.membership import Membership, nobody, sign_list
from swarmnode.swarm.storage.remembered import MembershipFile
from tests.swarm.society import NOW, OWNER, STRANGER, SWARM, Ticket, listed

SESSION, TRAIN, SPOT_CHECK, STATE, WEIGHTS, MANIFEST, PROBE, TRACE = (
    f"/swarmnode/{name}/1"
    for name in ("session", "train", "spot-check", "state", "weights", "manifest", "probe", "trace")
)
PROTOCOLS = (SESSION, TRAIN, SPOT_CHECK, STATE, WEIGHTS, MANIFEST, PROBE, TRACE, MEMBERSHIP_PROTOCOL)
HELLO = Hello(VERSION, SWARM, "test")


class Peer:
    """A peer with an access control; without a ticket a stranger, who shows nothing and admits everybody."""

    def __init__(self, town: Town, name: str, ticket: Ticket | None) -> None:
        identity = Identity(name.encode().ljust(32, b"."))
        self.id = identity.peer_id
        certificate = b"" if ticket is None else admit_peer(ticket.grant, ticket.key, SWARM, self.id, NOW)
        self.membership = Membership(SWARM, OWNER.public, private=ticket is not None, certificate=certificate)
        file = MembershipFile(town.folder / f"{name}.json")
        self.access_control = AccessControl(self.membership, file, clock=lambda: town.now, check_interval_s=0.02)
        self.looked = asyncio.Event()
        self.access_control.on_look = self.looked.set
        valid = by_subkey({**notice_rules(self.membership, lambda: town.now), b"": lambda *_: True})
        self.network: FakeNetwork = town.world.join(identity=identity, record_validator=valid)
        self.links = LinkConfig(gate=self.access_control)
        self.asked: list[str] = []
        self.lost: list[PeerError] = []
        self.boards: dict[str, Switchboard] = {}

    async def gets_in(self, member: Peer) -> bool:
        """Whether a member answers what only members may ask."""
        try:
            await self.ask(member, SESSION)
        except PeerError:
            return False
        return True

    async def start(self) -> None:
        await self.access_control.start(self.network, HELLO, self.links)
        for protocol in PROTOCOLS:
            if protocol != MEMBERSHIP_PROTOCOL:
                accept = self._accept(protocol)
                self.boards[protocol] = Switchboard(self.network, protocol, HELLO, self.links, accept=accept)
                await self.boards[protocol].start()

    def _accept(self, protocol: str) -> Callable[..., None]:
        def accept(channel: Channel, _frame: object, _body: object) -> None:
            self.asked.append(protocol)
            channel.close()

        return accept

    async def ask(self, other: Peer, protocol: str) -> None:
        """Open a link, ask, and wait for the answer. Raises what the link raises."""
        if protocol == MEMBERSHIP_PROTOCOL:
            await self.access_control.introduce(other.id)
            return
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_lost(error: PeerError) -> None:
            self.lost.append(error)
            if not answered.done():
                answered.set_exception(error)

        channel = await self.boards[protocol].call(other.id, lambda *_: answered.set_result(None), on_lost)
        channel.send(GetManifest())
        await answered

    async def hold(self, other: Peer, protocol: str) -> asyncio.Future[PeerError]:
        """Keep a conversation open; resolves when it is lost."""
        over: asyncio.Future[PeerError] = asyncio.get_running_loop().create_future()
        await self.boards[protocol].call(other.id, lambda *_: None, over.set_result)
        return over

    async def close(self) -> None:
        for board in self.boards.values():
            await board.close()
        await self.access_control.close()
        await self.network.close()


class Town:
    """Peers on one network, and the time that their clocks show."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.now = NOW
        self.world = FakeWorld(seed=1, clock=lambda: self.now)
        self.peers: list[Peer] = []

    async def peer(self, name: str, ticket: Ticket | None = None) -> Peer:
        peer = Peer(self, name, ticket)
        if self.peers:
            await peer.network.connect(await self.peers[0].network.addresses(), timeout_s=1)
        await peer.start()
        self.peers.append(peer)
        return peer


@pytest.fixture
async def town(tmp_path) -> AsyncIterator[Town]:
    town = Town(tmp_path)
    yield town
    for peer in town.peers:
        await peer.close()


async def until(peer: Peer, holds: Callable[[], bool]) -> None:
    """Wait for one of the access control's looks to bring it about."""

    async def look() -> None:
        while not holds():
            peer.looked.clear()
            await peer.looked.wait()

    await look()


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_stranger_reads_a_refusal_and_nothing_else(town: Town, protocol: str):
    member, stranger = await town.peer("member", Ticket()), await town.peer("stranger")
    with pytest.raises(PeerRefused) as caught:
        await stranger.ask(member, protocol)
    assert caught.value.code is ErrorCode.REFUSED
    assert not member.asked and not stranger.membership.revocations_bytes


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_members_ask_no_stranger(town: Town, protocol: str):
    """The other side is checked, too: who took a member's address gets none of its questions."""
    stranger, member = await town.peer("stranger"), await town.peer("member", Ticket())
    with pytest.raises(ProtocolError) as caught:
        await member.ask(stranger, protocol)
    assert caught.value.code is ErrorCode.REFUSED
    assert not stranger.asked


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_members_speak_with_one_another(town: Town, protocol: str):
    one, other = await town.peer("one", Ticket()), await town.peer("other", Ticket("another"))
    await one.ask(other, protocol)
    assert other.asked == ([] if protocol == MEMBERSHIP_PROTOCOL else [protocol])
    assert one.access_control.admits(other.id) and other.access_control.admits(one.id)


@pytest.mark.parametrize(
    ("asker", "protocol", "answerer", "allowed"),
    [
        (Role.CLIENT, SESSION, Role.VOLUNTEER, True),
        (Role.CLIENT, WEIGHTS, Role.BOOTSTRAP, True),
        (Role.CLIENT, MANIFEST, Role.BOOTSTRAP, True),
        (Role.CLIENT, SESSION, Role.CLIENT, False),
        (Role.CLIENT, WEIGHTS, Role.CLIENT, False),
        (Role.CLIENT, SESSION, Role.BOOTSTRAP, False),
        (Role.CLIENT, TRAIN, Role.VOLUNTEER, False),
        (Role.BOOTSTRAP, TRAIN, Role.VOLUNTEER, False),
        (Role.CLIENT, SPOT_CHECK, Role.VOLUNTEER, False),
        (Role.VOLUNTEER, SPOT_CHECK, Role.VOLUNTEER, True),
        (Role.VOLUNTEER, TRAIN, Role.VOLUNTEER, True),
        (Role.TRAINER, TRAIN, Role.VOLUNTEER, True),
        (Role.VOLUNTEER, TRAIN, Role.CLIENT, False),
    ],
)
async def test_roles(town: Town, asker: Role, protocol: str, answerer: Role, allowed: bool):
    one = await town.peer("asker", Ticket("a", role=asker))
    other = await town.peer("answerer", Ticket("b", role=answerer))
    if allowed:
        await one.ask(other, protocol)
        assert other.asked == [protocol]
    else:
        with pytest.raises(PeerError) as caught:
            await one.ask(other, protocol)
        assert caught.value.code is ErrorCode.REFUSED
        assert not other.asked


async def test_only_trainers_lead_where_one_is_there(town: Town):
    judge = await town.peer("judge", Ticket("j"))
    roles = {"t": Role.TRAINER, "v": Role.VOLUNTEER, "c": Role.CLIENT}
    trainer, volunteer, client = [await town.peer(name, Ticket(name, role=role)) for name, role in roles.items()]
    for peer in (trainer, volunteer):
        await peer.ask(judge, TRAIN)
    await client.ask(judge, SESSION)
    gate, all_three = judge.access_control, (trainer.id, volunteer.id, client.id)
    assert [gate.may_feed(peer) for peer in all_three] == [True, False, False]
    assert [gate.may_lead(peer, all_three) for peer in all_three] == [True, False, False]
    assert [gate.may_lead(peer, (volunteer.id, judge.id)) for peer in all_three] == [True, True, False]
    assert not gate.may_lead("nobody has met it", ())


async def test_a_revocation_goes_over_live_links_and_cuts_those_of_the_revoked(town: Town):
    """The owner's device tells one peer; a third one, linked to that one only, cuts the revoked peer."""
    door, server, evil = [await town.peer(name, Ticket(name)) for name in ("door", "server", "evil")]
    await server.ask(door, SESSION)
    over = await evil.hold(server, SESSION)
    door.access_control.accept_revocations(next(iter(door.access_control._links)), 1, listed(peers=(evil.id,)))
    error = await over
    assert isinstance(error, PeerRefused) and error.code is ErrorCode.REFUSED
    assert not server.access_control.admits(evil.id)
    with pytest.raises(PeerRefused):
        await evil.ask(server, SESSION)


async def test_a_revocation_goes_through_the_table_with_the_owner_gone(town: Town):
    first = await town.peer("first", Ticket("first"))
    evil = await town.peer("evil", Ticket("evil"))
    assert first.membership.adopt_list(listed(invites=(Ticket("evil").id,)))
    later = await town.peer("later", Ticket("later"))
    await until(later, lambda: later.membership.revocations.number == 1)
    with pytest.raises(PeerRefused):
        await evil.ask(later, SESSION)


async def test_who_was_away_hears_of_revocations_as_soon_as_it_greets(town: Town):
    old, new = await town.peer("old", Ticket("old")), await town.peer("new", Ticket("new"))
    for peer in (old, new):
        peer.network.dht.store = peer.network.dht.get = _no_table
    new.membership.adopt_list(listed(peers=("somebody",)))
    await old.ask(new, SESSION)
    await until(old, lambda: old.membership.revocations_bytes == new.membership.revocations_bytes)


async def _no_table(*_arguments: object, **_options: object) -> bool:
    raise PeerError("no table")


async def test_expiry_cuts_links_by_the_clock(town: Town):
    lasting = await town.peer("lasting", Ticket("lasting"))
    passing = await town.peer("passing", Ticket("passing", expires_at=NOW + 100))
    over = await passing.hold(lasting, SESSION)
    town.now = NOW + 99
    await lasting.access_control.exchange()
    assert not over.done()
    town.now = NOW + 100
    assert isinstance(await over, PeerRefused)


async def test_a_false_list_ends_the_link_and_changes_nothing(town: Town):
    one, other = await town.peer("one", Ticket("one")), await town.peer("other", Ticket("other"))
    over = await one.hold(other, SESSION)
    forged = sign_list(nobody(SWARM).extended(NOW, peers=[one.id]), STRANGER)
    next(iter(one.access_control._links)).send(Revocations(7, forged))
    assert isinstance(await over, PeerRefused)
    assert other.membership.revocations.number == 0 and other.access_control.admits(one.id)


async def test_the_last_place_of_an_invite_is_known_to_peers_that_never_met_its_user(town: Town):
    here, there = await town.peer("here", Ticket("here")), await town.peer("there", Ticket("there"))
    invite = Ticket("once", role=Role.CLIENT, uses=1)
    first, second = await town.peer("first", invite), await town.peer("second", invite)
    await first.ask(here, SESSION)
    await until(there, lambda: [use.member.peer for use in there.membership.uses] == [first.id])
    town.now += 61  # no race any more
    with pytest.raises(PeerRefused):
        await second.ask(there, SESSION)
    await first.ask(there, SESSION)


async def test_what_is_known_outlives_the_process(town: Town):
    peer = await town.peer("peer", Ticket("peer"))
    peer.membership.adopt_list(listed(peers=("somebody",)))
    peer.membership.record_use(Ticket("once", uses=1).certificate("12D3KooWsomebodyelse"), NOW)
    await peer.access_control.close()
    again = Peer(town, "peer", Ticket("peer"))
    assert again.membership.revocations == peer.membership.revocations
    assert [use.member.peer for use in again.membership.uses] == ["12D3KooWsomebodyelse"]
