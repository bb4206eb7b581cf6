"""Someone with the ticket of a shared tuning joins many times, with huge gradients or losses, to decide the adapter or end it."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from attack import Outcome, main
from torch import Tensor

from swarmnode.codec.messages import End, Error
from swarmnode.codec.tensors import Codec
from swarmnode.codec.tuning_messages import COTUNE_PROTOCOL, GetAdapter, JoinTuning, SharePiece
from swarmnode.errors import PeerError
from swarmnode.links.link_config import LinkConfig
from swarmnode.links.switchboard import Switchboard
from swarmnode.tuning.client import leader as leading
from swarmnode.tuning.client.adapter_averaging import BOUND, TrainerPart
from tests.peer.toy_peer import HELLO
from tests.tiny import TinyModel
from tests.training.scene import Talk
from tests.tuning.client.test_shared_tuner import Scene, scene_of

VIRTUAL, FAST = True, True
PEER, HOME, PLACES = [None] * 3, ["8.8.8.1", "8.8.8.2", "8.8.8.3"], [None] * 15
TRIES = {
    "huge gradients from one peer": (PEER, Codec.FP16, 1e3, 1.0, 2),
    "huge gradients from one home": (HOME, Codec.NONE, 1e15, 1.0, 2),
    "losses that overflow from one home": (HOME, Codec.NONE, 0.0, 1.7e308, 1),
    "losses below zero from all places": (PLACES, Codec.NONE, 0.0, -1.7e308, 1),
}
"""Parts that a crowd at these hosts (None: all of one peer) sends: codec, size of the numbers, mean loss, labels"""


async def lie(scene: Scene, talk: Talk, size: float, loss: float, labels: int) -> None:
    """Take part in all rounds of the tuning with a false part, until the leader ends the conversation."""
    try:
        answer = await talk.ask(JoinTuning(scene.leader.adapter, scene.leader.secret))
        talk.send(GetAdapter(0))
        length = scene.layout.size_bytes(scene.averaging.codec)
        raw = scene.layout.encode(torch.full((scene.layout.size_bytes(Codec.NONE) // 4,), size), scene.averaging.codec)
        for step in range(scene.run.steps):
            while not getattr(answer, "last", False) and not (
                isinstance(answer, SharePiece) and answer.step == step - 1
            ):
                answer = await talk.next()
                if isinstance(answer, Error | End | PeerError):
                    return
            answer = await talk.ask(SharePiece(step, 0, length, labels, loss), [raw])
    except (PeerError, asyncio.TimeoutError):
        pass


def watched(norms: list[tuple[float, float]], mean_of: object) -> object:
    """Return `mean_of`, which notes the norms of the leader's own part and of the mean."""

    def watch(parts: Sequence[TrainerPart], *others: float) -> TrainerPart:
        mean: TrainerPart = mean_of(parts, *others)  # type: ignore[operator]
        norms.append((parts[0].norm, mean.norm))
        return mean

    return watch


async def tuned(folder: Path, hosts: Sequence[str | None], codec: Codec, size: float, loss: float, labels: int) -> str:
    """Tune with an honest follower and a crowd. Returns what the crowd did to them; empty if nothing."""
    norms: list[tuple[float, float]] = []
    honest_mean, leading.mean_of = leading.mean_of, watched(norms, leading.mean_of)  # type: ignore[assignment]
    try:
        async with scene_of(folder, steps=1, codec=codec) as scene:
            network = scene.world.join(host=hosts[0])
            boards, liars = [], []
            for place, host in enumerate(hosts):
                if host is not None and place:
                    network = scene.world.join(host=host)
                if host is not None or not place:
                    await network.connect(await scene.peers[0].network.addresses(), timeout_s=1)
                    boards.append(Switchboard(network, COTUNE_PROTOCOL, HELLO, LinkConfig()))
                talk = await Talk.begin(boards[-1], scene.peers[0].network.peer_id)
                liars.append(asyncio.ensure_future(lie(scene, talk, size, loss, labels)))
                await asyncio.sleep(0.1)
            tuning = [asyncio.ensure_future(scene.follow()), asyncio.ensure_future(scene.lead())]
            await asyncio.wait(tuning, timeout=3600.0)
            ends = [one.exception() if one.done() else "no end" for one in tuning]
            for one in (*liars, *tuning):
                one.cancel()
            await asyncio.gather(*liars, *tuning, return_exceptions=True)
            for board in boards:
                await board.close()
            weights: list[Tensor] = [scene.weights(place) for place in (0, 1) if scene.trainers[place].states]
    finally:
        leading.mean_of = honest_mean
    pulled = max((mean / own for own, mean in norms if own), default=math.nan)
    harms = [f"a trainer ended by {end!r}" for end in ends if end is not None]
    harms += [] if pulled <= BOUND * 1.001 else [f"the mean is {pulled:.0f} times the leader's own gradient"]
    harms += [] if all(bool(one.isfinite().all()) for one in weights) else ["the adapter is not finite"]
    return ", ".join(harms)


async def attack() -> Outcome:
    said = []
    with tempfile.TemporaryDirectory() as folder:
        model = TinyModel.save(Path(folder), layers=2).folder
        for name, what in TRIES.items():
            if harm := await tuned(model, *what):
                said.append(f"{name}: {harm}")
    return Outcome(
        not said, "; ".join(said) or f"{len(TRIES)} crowds, and no mean beyond four times the leader's own gradient"
    )


main(__name__, attack, virtual=VIRTUAL)
