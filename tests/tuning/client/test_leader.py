"""A leader and followers that break its rules, in virtual time; and the mean that one of them cannot decide."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from swarmnode.codec.messages import Error
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import (
    COTUNE_PROTOCOL,
    AdapterPiece,
    GetAdapter,
    JoinTuning,
    SharePiece,
    TuningJoined,
)
from swarmnode.errors import ErrorCode, LeaderLost, UsageError
from swarmnode.net.links.switchboard import Switchboard
from swarmnode.tuning.client.averaging import BOUND, TrainerPart, mean_of
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
    mean = mean_of(honest, 0.0)
    assert torch.allclose(mean.vector_N, ONES / 2) and (mean.labels, mean.loss) == (4, 1.5)
    for others in ([ONES], [ONES, ONES, 1e9 * ONES]):
        parts = [
            TrainerPart(ONES, 1, 1.0),
            *(TrainerPart(one, 1, 1.0) for one in others),
            TrainerPart(1e9 * ONES, 1, 1.0),
        ]
        assert mean_of(parts, 0.0).norm <= BOUND * ONES.norm()
    silent = [TrainerPart(0 * ONES, 0, 0.0), TrainerPart(ONES, 4, 2.0)]
    assert torch.equal(mean_of(silent, 0.0).vector_N, ONES), "a leader without labels measures no other"
    small = [TrainerPart(1e-6 * ONES, 1, 0.0), TrainerPart(0.4 * ONES, 1, 0.0)]
    assert mean_of(small, 1.0).norm == pytest.approx(0.4, rel=1e-3), "below --clip nothing is scaled down"


@asynccontextmanager
async def joined(scene: Scene, count: int) -> AsyncIterator[list[Talk]]:
    """Conversations of followers that have the leader's settings."""
    board = Switchboard(scene.peers[1].network, COTUNE_PROTOCOL, HELLO, scene.peers[1].link_config)
    talks = []
    for _ in range(count):
        talks.append(await Talk.begin(board, scene.peers[0].network.peer_id))
        answer = await talks[-1].ask(JoinTuning(scene.leader.adapter, scene.leader.secret))
        assert isinstance(answer, TuningJoined) and answer.every == scene.averaging.every
    yield talks
    await board.close()


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
        "a loss that is NaN": (SharePiece(0, 0, size, 4, math.nan), raw, ErrorCode.NOT_FINITE),
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
