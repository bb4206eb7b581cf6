"""A leader and followers that break its rules, in virtual time; and the mean that one of them cannot decide."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from swarmnode.codec.frames import FrameKind
from swarmnode.codec.messages import Error, decode_body, encode_body
from swarmnode.codec.tensors import Codec
from swarmnode.codec.training_messages import MAX_NORM
from swarmnode.codec.tuning_messages import (
    COTUNE_PROTOCOL,
    MAX_SHARE_LABELS,
    AdapterPiece,
    GetAdapter,
    JoinTuning,
    SharePiece,
    TuningJoined,
)
from swarmnode.errors import ErrorCode, LeaderLost, ProtocolError, UsageError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.tuning.client.adapter_averaging import BOUND, TrainerPart, mean_of, share_pieces
from swarmnode.tuning.client.follower import Ticket, TuningFollower
from swarmnode.tuning.client.leader import MAX_FOLLOWERS
from tests.net.virtual import in_virtual_time
from tests.peer.toy_peer import HELLO
from tests.training.scene import Talk
from tests.tuning.client.test_shared_tuner import Scene, folder, scene_of

__all__ = ["folder"]
ONES = torch.ones(4)


def test_the_mean_counts_labels_and_no_liar_decides_it() -> None:
    honest = [TrainerPart(ONES, 3, 1.0), TrainerPart(-ONES, 1, 3.0)]
    mean = mean_of(honest)
    assert torch.allclose(mean.vector_N, ONES / 2) and (mean.labels, mean.loss) == (4, 1.5)
    silent = [TrainerPart(0 * ONES, 0, 0.0), TrainerPart(ONES, 4, 2.0)]
    assert torch.equal(mean_of(silent, 0.5).vector_N, ONES / 2 * ONES.norm()), (
        "a leader without labels has its last norm"
    )


@pytest.mark.parametrize("labels", [1, 1000])
@pytest.mark.parametrize("homes", ["a", "ab", "aab", "aaaaaaaaaaaaaaa", "abababababababa", "abc", "abcd", "aaaaaaabcd"])
def test_liars_of_two_homes_pull_within_four_times_the_leaders_norm(homes: str, labels: int) -> None:
    """Liars are of the homes a and b, in any number, with or without two honest trainers of others."""
    size = {"a": 1e9, "b": 1e9}
    parts = [TrainerPart(ONES, 1, 1.0), *(TrainerPart(size.get(home, 1.0) * ONES, labels, 1.0, home) for home in homes)]
    others_decide = homes == "abc"  # two of three homes are liars
    assert (mean_of(parts).norm > BOUND * float(ONES.norm()) * 1.0001) is others_decide


def test_the_median_of_three_homes_lets_honest_trainers_count_whole() -> None:
    parts = [TrainerPart(1e-3 * ONES, 1, 1.0), *(TrainerPart(ONES, 1, 1.0, home) for home in "abc")]
    assert mean_of(parts).norm == pytest.approx(3.001 / 4 * float(ONES.norm()), rel=1e-5)
    assert mean_of(parts[:3]).norm < BOUND * parts[0].norm, "two of them are no measure"


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, math.inf, -math.inf, math.nan])
def test_a_loss_that_sums_overflow_with_is_no_loss(loss: float) -> None:
    with pytest.raises(ProtocolError):
        TrainerPart(ONES, 1, loss)
    assert math.isfinite(mean_of([TrainerPart(ONES, 1 << 40, MAX_NORM)] * 16).loss)


def test_labels_of_a_mean_stay_within_the_bounds_of_the_wire() -> None:
    (piece, _), *_ = share_pieces(0, TrainerPart(ONES, 16 * MAX_SHARE_LABELS, 1.0), bytes(16))
    assert decode_body(FrameKind.SHARE_PIECE, encode_body(piece)) == piece


@asynccontextmanager
async def joined(scene: Scene, count: int) -> AsyncIterator[list[Talk]]:
    """Conversations of followers, each a peer of its own, that have the leader's settings."""
    async with asking(scene, [None] * count) as (talks, answers):
        assert all(isinstance(answer, TuningJoined) and answer.every == scene.averaging.every for answer in answers)
        yield talks


@asynccontextmanager
async def asking(
    scene: Scene, hosts: Sequence[str | None], relay: str = ""
) -> AsyncIterator[tuple[list[Talk], list[object]]]:
    """Conversations that ask the leader to be admitted, one of a peer at each of `hosts`, and the answers."""
    networks, boards, talks, answers = [], [], [], []
    for host in hosts:
        network = scene.world.join(host=host)
        if relay:
            network.address = f"/ip4/{host}/tcp/4001/p2p/{relay}/p2p-circuit/p2p/{network.peer_id}"
        await network.connect(await scene.peers[0].network.addresses(), timeout_s=1)
        boards.append(Switchboard(network, COTUNE_PROTOCOL, HELLO, LinkConfig()))
        talks.append(await Talk.begin(boards[-1], scene.peers[0].network.peer_id))
        answers.append(await talks[-1].ask(JoinTuning(scene.leader.adapter, scene.leader.secret)))
        networks.append(network)
    yield talks, answers
    for board in boards:
        await board.close()
    await asyncio.sleep(1.0)
    for network in networks:
        await network.close()


@in_virtual_time
async def test_one_conversation_of_a_peer_the_newest_counts(folder: Path) -> None:
    async with scene_of(folder) as scene:
        board = Switchboard(scene.peers[1].network, COTUNE_PROTOCOL, HELLO, scene.peers[1].link_config)
        talks = []
        for _ in range(MAX_FOLLOWERS + 3):
            talks.append(await Talk.begin(board, scene.peers[0].network.peer_id))
            assert isinstance(await talks[-1].ask(JoinTuning(scene.leader.adapter, scene.leader.secret)), TuningJoined)
            assert len(scene.leader._followers) == 1
        assert [await talk.next() for talk in talks[:-1]] == [Error(ErrorCode.STALE)] * (len(talks) - 1)
        await board.close()


@pytest.mark.parametrize(
    ("hosts", "admitted"),
    [
        (["8.8.8.1", "8.8.8.2", "8.8.9.1"], [True, False, True]),
        (["2001:4860::1", "2001:4860:0:1::2", "2001:4861::1"], [True, False, True]),
        (["192.168.1.2", "192.168.1.3"], [True, True]),
    ],
)
@in_virtual_time
async def test_one_conversation_of_a_home(folder: Path, hosts: list[str], admitted: list[bool]) -> None:
    async with scene_of(folder) as scene, asking(scene, hosts) as (_, answers):
        assert [isinstance(answer, TuningJoined) for answer in answers] == admitted
        assert {answer.code for answer in answers if isinstance(answer, Error)} <= {ErrorCode.BUSY}


@in_virtual_time
async def test_a_crowd_behind_one_relay_gives_places_up_to_others(folder: Path) -> None:
    async with scene_of(folder) as scene:
        relay = scene.peers[1].network.peer_id
        async with asking(scene, ["8.8.8.1"] * (MAX_FOLLOWERS + 2), relay) as (_, crowd):
            assert [isinstance(answer, TuningJoined) for answer in crowd] == [True] * MAX_FOLLOWERS + [False] * 2
            async with asking(scene, [f"9.9.{place}.1" for place in range(MAX_FOLLOWERS - 2)]) as (_, others):
                assert all(isinstance(answer, TuningJoined) for answer in others)
                assert len(scene.leader._followers) == MAX_FOLLOWERS


def lies(scene: Scene) -> dict[str, tuple[SharePiece, bytes, ErrorCode]]:
    size = scene.layout.size_bytes(Codec.NONE)
    good, raw = SharePiece(0, 0, size, 4, 1.0), bytes(size)
    replaced = {
        "another step": (SharePiece(3, 0, size, 4, 1.0), raw),
        "another size": (SharePiece(0, 0, size + 4, 4, 1.0), raw),
        "gigabytes": (SharePiece(0, 0, 1 << 36, 4, 1.0), raw[:8]),
        "nothing": (good, b""),
        "more labels than the batch has": (SharePiece(0, 0, size, 1 << 30, 1.0), raw),
        "a piece out of order": (SharePiece(0, 8, size, 4, 1.0), raw[8:]),
    }
    nan = torch.full((size // 4,), math.nan).numpy().tobytes()
    return {
        **{name: (*lie, ErrorCode.MALFORMED) for name, lie in replaced.items()},
        "NaN": (good, nan, ErrorCode.NOT_FINITE),
        "huge": (good, torch.full((size // 4,), 3e38).numpy().tobytes(), ErrorCode.NOT_FINITE),
        "a loss that is NaN": (SharePiece(0, 0, size, 4, math.nan), raw, ErrorCode.NOT_FINITE),
        "a loss that overflows": (SharePiece(0, 0, size, 4, 1.7e308), raw, ErrorCode.NOT_FINITE),
        "a loss far below zero": (SharePiece(0, 0, size, 4, -1.7e308), raw, ErrorCode.NOT_FINITE),
    }


@in_virtual_time
async def test_a_follower_that_breaks_a_rule_is_left_out_and_the_others_go_on(folder: Path) -> None:
    async with scene_of(folder, steps=1) as scene, joined(scene, len(lies(scene))) as talks:
        scene.leader._wanted = 2 + len(talks)
        leading, honest = asyncio.ensure_future(scene.lead()), asyncio.ensure_future(scene.follow())
        for talk in talks:
            talk.send(GetAdapter(0))
        for talk, (name, (piece, raw, code)) in zip(talks, lies(scene).items(), strict=True):
            last: object = None
            while not (isinstance(last, AdapterPiece) and last.last):
                last = await talk.next()
            answer = await talk.ask(piece, [raw] if raw else [])
            assert isinstance(answer, Error) and answer.code == code, name
        assert await asyncio.gather(leading, honest) == [1, 1]
        assert torch.equal(scene.weights(0), scene.weights(1))


@in_virtual_time
async def test_only_a_ticket_admits_and_only_so_many(folder: Path) -> None:
    async with scene_of(folder) as scene:

        async def refused(match: str, ticket: Ticket = scene.ticket) -> None:
            with pytest.raises(LeaderLost, match=match):
                await TuningFollower.join(scene.peers[1], ticket)

        await refused("REFUSED", replace_ticket(scene, secret=bytes(16)))
        await refused("REFUSED", replace_ticket(scene, adapter=bytes(16)))
        async with joined(scene, MAX_FOLLOWERS):
            await refused("BUSY")
        scene.peers[0].link_config.ledger.limit_bytes = 1000
        await refused("BUSY")
        scene.leader._closes_s = -1.0
        await refused("REFUSED")


def replace_ticket(scene: Scene, **changes: bytes) -> Ticket:
    ticket = scene.ticket
    fields = {name: getattr(ticket, name) for name in ticket.__struct_fields__}
    return Ticket(**{**fields, **changes})


def test_a_ticket_is_a_line_of_text() -> None:
    ticket = Ticket(bytes(32), "leader", ("/ip4/10.0.0.1/tcp/4001",), bytes(16), bytes([7] * 16))
    text = ticket.as_text()
    assert Ticket.read(f" {text[:40]}\n{text[40:].upper()} ") == ticket
    for wrong, words in (("swarm1abc", "no ticket"), (text[:-1] + "a", "damaged"), ("tune1mfrgg", "damaged")):
        with pytest.raises(UsageError, match=words):
            Ticket.read(wrong)
