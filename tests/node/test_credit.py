"""Receipts in a whole swarm: who is served signs, who did the work keeps what is true of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from swarmnode.client.swarm_client import SwarmClient
from swarmnode.client.training.preparation import NO_DATA
from swarmnode.codec.messages import SignedReceipt
from swarmnode.credit import receipts
from swarmnode.credit.receipts import CREDIT_PROTOCOL, GATHER_S, ReceiptIssuer, ReceiptKeeper, folder_credits
from swarmnode.errors import ErrorCode, PeerRefused
from swarmnode.links.switchboard import Switchboard
from swarmnode.net.identity import Identity, verify
from swarmnode.node.node import REPORT_S
from swarmnode.peer.questions import ask
from swarmnode.plan.credit import HALF_CREDIT, Credit
from swarmnode.swarm.records.manifest import CREDIT, TRAIN
from swarmnode.swarm.records.receipt import Receipt, ReceiptFolder, receipts_of, sign_receipt
from swarmnode.swarm.records.run import Run
from tests.net.virtual import in_virtual_time
from tests.node.conftest import Founded
from tests.node.virtual_swarm import VirtualMember, VirtualSwarm
from tests.tiny import PROMPT, TinyModel

TOKENS = 8
POSITIONS = len(PROMPT) + TOKENS - 1  # the last token is told and not fed


@contextlib.asynccontextmanager
async def two_stages(founded: Founded, folder: Path) -> AsyncIterator[VirtualSwarm]:
    async with VirtualSwarm(folder) as swarm:
        founded.into(swarm)
        await swarm.bootstrap()
        for span in ("0:2", "2:6"):
            await swarm.node(f"node {span}", span).wait_for("ready")
        yield swarm


def credits(swarm: VirtualSwarm) -> dict[str, Credit]:
    """By node, from the files alone."""
    by_peer = {member.peer: name for name, member in swarm.members.items()}
    found = folder_credits(swarm.folder / "homes")
    return {by_peer[one.worker]: one.credit for one in found}


def receipts_in(folder: Path) -> int:
    return len(list(folder.rglob("*.receipt")))


@in_virtual_time
async def test_each_hop_is_credited_for_what_it_did_when_the_client_leaves(founded: Founded, tmp_path: Path) -> None:
    async with two_stages(founded, tmp_path) as swarm:
        async with swarm.client() as client:
            await client.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
            assert credits(swarm) == {}
        found = credits(swarm)
        assert {name: credit.served for name, credit in found.items()} == {
            "node 0:2": 2 * POSITIONS,
            "node 2:6": 4 * POSITIONS,
        }
        assert all(list(credit.by_client) == [client.peer_id] for credit in found.values())
        assert all(credit.counted == 0 for credit in found.values()), "of one client alone nothing counts"


@in_virtual_time
async def test_a_leaving_node_tells_what_its_home_has_given(founded: Founded, tmp_path: Path) -> None:
    async with two_stages(founded, tmp_path) as swarm:
        async with swarm.client() as client:
            for _ in range(2):
                await client.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
        member = swarm.members["node 0:2"]
        await asyncio.sleep(2 * REPORT_S)
        reports = [one for one in member.seen if one["event"] == "report"]
        assert reports[0]["answers"] == 2 and len(reports) == 1, "nothing is new in the second minute"
        assert member.node.describe()["given"]["answers"] == 2
        member.leave()
        await member.wait_for("left")
        given = next(one["given"] for one in member.seen if one["event"] == "left")
        assert (given["answers"], given["people"], given["visits"], given["kwh"]) == (2, 0, 1, None), (
            "nobody can tell who it was"
        )
        assert given["lent_s"] >= 2 * REPORT_S


@in_virtual_time
async def test_a_homes_own_requests_are_not_work_for_others(founded: Founded, tmp_path: Path) -> None:
    """Of the node that is the second hop too, as soon as a receipt says whose the work was."""
    async with two_stages(founded, tmp_path) as swarm:
        first, second = swarm.members["node 0:2"], swarm.members["node 2:6"]

        def given() -> list[int]:
            return [member.node.describe()["tokens"] for member in (first, second)]

        for member, expected in ((first, [0, POSITIONS]), (second, [POSITIONS, POSITIONS])):
            async with swarm.client(home=member.node.config.host.home) as own:
                await own.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
            assert given() == expected
        async with swarm.client() as other:
            await other.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
        assert given() == [2 * POSITIONS, 2 * POSITIONS]
        assert credits(swarm)["node 0:2"].served == 3 * 2 * POSITIONS, "receipts are for all"


@in_virtual_time
async def test_sessions_of_a_client_go_on_one_receipt(founded: Founded, tmp_path: Path) -> None:
    async with two_stages(founded, tmp_path) as swarm, swarm.client() as client:
        for _ in range(3):
            await client.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
            await asyncio.sleep(GATHER_S + 1)
        assert credits(swarm)["node 0:2"].served == 3 * 2 * POSITIONS
        assert receipts_in(tmp_path) == 2, "one a node"
        async with swarm.client() as other:
            await other.generate(PROMPT, max_new_tokens=TOKENS, drafts="off")
        credit = credits(swarm)["node 0:2"]
        assert credit.clients == 2 and credit.counted == pytest.approx(2 * 2 * POSITIONS * 4 * 3 / 16)


@in_virtual_time
async def test_who_moves_a_session_credits_all_who_served_it(founded: Founded, tmp_path: Path) -> None:
    async with two_stages(founded, tmp_path) as swarm:
        await swarm.node("second", "0:2").wait_for("ready")
        async with swarm.client() as client:
            stream = await client.stream(PROMPT, max_new_tokens=TOKENS, drafts="off")
            async for _ in stream:
                if len(stream.result.ids) == 4:
                    swarm.member(stream.result.route[0].peer).leave()
            assert stream.result.reroutes == 1
        found = credits(swarm)
        assert found["node 2:6"].served == 4 * POSITIONS
        assert set(found) >= {"node 2:6", swarm.member(stream.result.route[0].peer).name}


@in_virtual_time
async def test_a_client_that_does_not_sign_is_served_and_seen(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceiptIssuer, "served", lambda *_: None)
    async with two_stages(founded, tmp_path) as swarm, swarm.client() as client:
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS, drafts="off")
        session = stream._ring.session  # its route says who is told of it below
        async for _ in stream:
            pass
        assert len(stream.result.ids) == TOKENS and session.route
        await asyncio.sleep(2 * GATHER_S)
        assert credits(swarm) == {}
        readings = {reading.metric.name: reading.value for reading in keeper_of(swarm.members["node 0:2"]).readings()}
        assert readings["swarmnode_completed_unit_tokens_total"] == 2 * POSITIONS
        assert readings["swarmnode_receipted_unit_tokens_total"] == 0


@in_virtual_time
async def test_who_trains_is_credited_by_the_trainer(tiny: TinyModel, tmp_path: Path) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder, mode=TRAIN)
        await swarm.bootstrap()
        for span in ("0:2", "2:6"):
            await swarm.node(f"node {span}", span, compress="none").wait_for("ready")
        run = Run(data=NO_DATA, steps=2, batch=4, microbatch=2, sequence=16)
        assert await swarm.trainer("trainer", Path(__file__), run).finish() == 2
        trained = {name: credit.trained for name, credit in credits(swarm).items()}
        assert trained == {"node 0:2": 2 * 2 * 4 * 16, "node 2:6": 4 * 2 * 4 * 16}


def keeper_of(member: VirtualMember) -> ReceiptKeeper:
    assert member.node._receipts is not None
    return member.node._receipts


class Claimant:
    """A client that brings receipts of its own making."""

    def __init__(self, client: SwarmClient, worker: str) -> None:
        self._host = client._host
        self._board = Switchboard(self._host.network, CREDIT_PROTOCOL, self._host.hello, self._host.link_config)
        now = int(self._host.clock.unix())
        self.receipt = Receipt(self._host.swarm.id, client.peer_id, worker, now - 10, now, 1)

    async def brings(self, work: bytes, **changes: object) -> ErrorCode | None:
        """Why a receipt is not taken; None where it is."""
        made = msgspec.structs.replace(self.receipt, **changes)
        try:
            async for _ in ask(
                self._board, self.receipt.worker, SignedReceipt((work,), sign_receipt(made, self._host.identity.sign))
            ):
                raise AssertionError("END says all")
        except PeerRefused as error:
            return error.code
        return None

    async def close(self) -> None:
        await self._board.close()


@in_virtual_time
async def test_whose_node_has_credit_has_more_of_the_time_where_the_swarm_says_so(
    tiny: TinyModel, tmp_path: Path
) -> None:
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder, priority=CREDIT)
        await swarm.bootstrap()
        giver, member = swarm.node("giver", "2:6"), swarm.node("node 0:2", "0:2")
        for node in (giver, member):
            await node.wait_for("ready")
        keep_receipts(swarm, giver, 6 * HALF_CREDIT)
        async with swarm.client(home=giver.home) as generous, swarm.client() as other:
            for client in (generous, other):
                await client.generate(PROMPT, max_new_tokens=1)
                await client._claims.shown()
            weight_of = member.node._host.weight_of  # type: ignore[union-attr]
            assert weight_of(generous.peer_id) == pytest.approx(2.5), "half of what can be had"
            assert weight_of(other.peer_id) == 1.0
        async with swarm.client(home=giver.home) as again:
            await again.generate(PROMPT, max_new_tokens=1)
            await again._claims.shown()
            assert weight_of(again.peer_id) == pytest.approx(2.5, rel=0.01)
            assert weight_of(generous.peer_id) == 1.0, "credit is for one client at a time"


@in_virtual_time
async def test_who_has_little_credit_takes_nobodys_place(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "MAX_WORKERS", 1)
    async with VirtualSwarm(tmp_path) as swarm:
        swarm.create(tiny.folder, priority=CREDIT)
        await swarm.bootstrap()
        givers = [swarm.node(name, "2:6") for name in ("much", "little")]
        member = swarm.node("node 0:2", "0:2")
        for node in (*givers, member):
            await node.wait_for("ready")
        for giver, tokens in zip(givers, (HALF_CREDIT, HALF_CREDIT // 10), strict=True):
            keep_receipts(swarm, giver, 6 * tokens)
        weights = []
        for giver in givers:
            async with swarm.client(home=giver.home) as client:
                await client.generate(PROMPT, max_new_tokens=1)
                await client._claims.shown()
                weights.append(partial(member.node._host.weight_of, client.peer_id))  # type: ignore[union-attr]
        assert [round(weight(), 1) for weight in weights] == [2.5, 1.0]


def keep_receipts(swarm: VirtualSwarm, giver: VirtualMember, unit_tokens: int) -> None:
    """As if two clients had signed for so much each."""
    now, id_ = int(swarm.unix()), swarm.load().id
    folder = ReceiptFolder(receipts_of(giver.home, id_), id_, giver.peer, verify, swarm.unix)
    for friend in (Identity(bytes([number] * 32)) for number in range(1, 3)):
        receipt = Receipt(id_, friend.peer_id, giver.peer, now - 60, now, unit_tokens)
        folder.store(receipt, sign_receipt(receipt, friend.sign))


@in_virtual_time
async def test_no_receipt_says_more_than_was_done(
    founded: Founded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReceiptIssuer, "served", lambda *_: None)
    async with two_stages(founded, tmp_path) as swarm, swarm.client() as client:
        stream = await client.stream(PROMPT, max_new_tokens=TOKENS, drafts="off")
        session = stream._ring.session
        async for _ in stream:
            pass
        done, member = 2 * POSITIONS, swarm.members["node 0:2"]
        claimant = Claimant(client, member.peer)
        refused = ErrorCode.REFUSED
        assert await claimant.brings(bytes(16), served=1) is refused, "a session that never was"
        assert await claimant.brings(session.id, served=done + 1) is refused, "more than was done"
        assert await claimant.brings(session.id, served=1 << 53) is refused
        assert await claimant.brings(session.id, served=1, client=member.peer) is ErrorCode.MALFORMED, "for itself"
        other = swarm.members["node 2:6"].peer
        assert await claimant.brings(session.id, served=1, worker=other) is refused, "somebody else's"
        assert await claimant.brings(session.id, served=1, client=other) is refused, "in another's name"
        assert await claimant.brings(session.id, served=done) is None
        assert await claimant.brings(session.id, served=done) is refused, "the same once more"
        assert await claimant.brings(session.id, served=done, since=claimant.receipt.since - 1) is refused, "twice"
        assert await claimant.brings(session.id, served=done - 1) is refused, "less"
        assert keeper_of(member).credit.served == done
        await claimant.close()
